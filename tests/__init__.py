"""Tests in layers: unit, distributed (several processes), e2e (a real server),
and gpu (CUDA only)."""
