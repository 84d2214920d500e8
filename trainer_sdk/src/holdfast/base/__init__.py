"""Parts that the whole SDK uses: settings, handles of saves, and notices."""
