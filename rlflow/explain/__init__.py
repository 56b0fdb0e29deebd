"""What a plan says before anything is started: who runs where and when, what moves, what lies in memory. Pure: nothing is loaded."""
