"""What an orchestrator counts and tells of itself."""
