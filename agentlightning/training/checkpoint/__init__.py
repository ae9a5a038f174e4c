"""What a run leaves on disk to go on from: checkpoints, what is read out of them, and what is made of them."""
