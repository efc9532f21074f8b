"""Programs for those who work on Reelgate. Not installed with it; run from the root of the repository."""
