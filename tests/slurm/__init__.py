"""Jobs on a real Slurm cluster of virtual nodes."""
