"""What an algorithm's file is written with: stages, losses, flows, `repeat` and dispatch modes. Loads no torch."""
