"""Features: uses of the engine beside generating tokens. Deleting a folder or a file here deletes that feature alone."""
