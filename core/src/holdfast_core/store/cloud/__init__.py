"""Azure Blob Storage and Google Cloud Storage, over obstore: keys of each cloud, errors, client and store."""
