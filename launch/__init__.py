"""Starts and supervises the processes of a run.

`local` is for one machine, `slurm` for the nodes of a job, `mpi` for ranks of mpirun or srun.
`sglang_server` starts the servers of a node; `preflight` comes before all of it.
"""
