"""Compiles with the cache in this process."""

from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

from fusekit.config import Config, CuteConfig
from fusekit.cute import cache, dsl
from fusekit.cute.report import counts
from tests.cute import kernels

ORIGINAL = CutlassBaseDSL.compile_and_cache


class Rig:
    """Compiles with the cache over the store in `root`; each call is as of a new process, but for what was imported."""

    def __init__(self, root, report):
        self.root, self.report = root, report

    def run(self, work=kernels.compile_kernel, **settings):
        """((hits, misses) of `work`, its result)."""
        self.report.write_text("")
        config = settings.pop("config", None) or Config(store=self.root)
        cute_config = CuteConfig(config, report=self.report, **settings)
        CutlassBaseDSL.compile_and_cache = ORIGINAL
        dsl.patch(cache.Cache(cute_config).serve)
        try:
            result = work()
        finally:
            CutlassBaseDSL.compile_and_cache = ORIGINAL
        return counts(self.report)[:2], result

    def counted(self, *args, **settings):
        return self.run(*args, **settings)[0]

    def entry(self):
        (path,) = self.root.glob("entries/*/*.json")
        return path

    def blob(self):
        (path,) = self.root.glob("blobs/sha256/*/*")
        return path
