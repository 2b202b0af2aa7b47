"""The extension, which backend takes a call, and what the environment says of both."""
