"""What is given for a run, and the roles that are made of it: models by their backends, rewards by their specifications."""
