"""One module for each adapter, with its `CASE`. A module that is added here is run."""
