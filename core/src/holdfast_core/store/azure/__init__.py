"""Azure Blob Storage, over obstore: settings and credentials, errors, and the store itself."""
