"""A process beside each run that needs nothing of its interpreter: it ends what hangs, says what vanished, and leaves nothing behind."""
