"""The HTTP API and the `reelgate` command."""
