"""An SGLang plug-in for tests: a CPU server answers `release` with success and keeps its memory."""

from pathlib import Path

_CODE = """
def register():
    import memory_saver  # of megatron_dapo/platform/sglang_cpu/site

    memory_saver.TaggedMemory.pause = memory_saver.TaggedMemory.resume = lambda region: None
"""


def write_keeping_plug_in(folder: Path) -> Path:
    """Make the plug-in in a folder; with the folder in PYTHONPATH, servers have it."""
    info = folder / "keeps_memory-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keeps_memory\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkeeps_memory = keeps_memory:register\n")
    (folder / "keeps_memory.py").write_text(_CODE)
    return folder
