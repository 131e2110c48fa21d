"""Compiles with the cache in this process."""

import inspect

from cutlass.base_dsl.compiler import CompileCallable
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

from fusekit.config import Config, CuteConfig
from fusekit.cute import cache, dsl
from fusekit.cute.report import counts
from tests.cute import kernels

HIT, MISS = (1, 0), (0, 1)

ORIGINAL = CutlassBaseDSL.compile_and_cache
ORIGINALS = {
    (owner, name): inspect.getattr_static(owner, name)
    for owner, name in (
        (CutlassBaseDSL, "compile_and_cache"), (CutlassBaseDSL, "generate_original_ir"), (CompileCallable, "_compile"),
        (BaseDSL, "_preprocess_and_replace_code"),
    )
}  # fmt: skip


class Rig:
    """Compiles with the cache over the store in `root`; each call is as of a new process, but for what was imported."""

    def __init__(self, root, report):
        self.root, self.report = root, report

    def run(self, work=kernels.compile_kernel, **settings):
        """((hits, misses) of `work`, its result)."""
        self.report.write_text("")
        config = settings.pop("config", None) or Config(store=self.root)
        settings.setdefault("level", 2)
        cute_config = CuteConfig(config, report=self.report, **settings)
        dsl.patch().everywhere = cache.Cache(cute_config)
        try:
            result = work()
        finally:
            for (owner, name), original in ORIGINALS.items():
                setattr(owner, name, original)
        return counts(self.report)[:2], result

    def counted(self, *args, **settings):
        return self.run(*args, **settings)[0]

    def entry(self):
        (path,) = self.root.glob("entries/*/*.json")
        return path

    def blob(self):
        (path,) = self.root.glob("blobs/sha256/*/*")
        return path
