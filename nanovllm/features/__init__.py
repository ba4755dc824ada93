"""What the engine can do beside generating tokens. Deleting a folder or a file here deletes that feature alone."""
