"""What every part of the SDK uses: settings, handles of saves, notices, and layout documents."""
