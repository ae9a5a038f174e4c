"""What is remembered of the Responses dialect, for the attempt that said it and for nobody else."""
