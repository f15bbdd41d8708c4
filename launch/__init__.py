"""Starts and supervises the processes of a run: `local` on one machine, `slurm` over the nodes of a
job, `mpi` for ranks of mpirun or srun; `sglang_server` for the servers of a node, `preflight`
before all of it."""
