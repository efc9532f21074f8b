"""All effects. Everything an activity needs comes through its constructor, never from settings."""
