"""What the tests of the adapters to training frameworks share."""
