"""The plan and outcome of a Slurm job for slurm/body.sh: roles, nodes, ports, commands, and how the
job ended."""
