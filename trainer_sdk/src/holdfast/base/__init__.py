"""Parts that the whole SDK uses: settings, handles of saves, notices, and layout documents."""
