"""What slurm/body.sh asks: who does what on which node, with which ports and commands, and how the job ended."""
