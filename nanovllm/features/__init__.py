"""Features: what the engine can do beside generating tokens. Deleting one of them deletes that feature alone."""
