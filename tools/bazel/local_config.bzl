"""What the build takes from this machine: headers inside Python packages, and nvcc.

One repository, @jax_mla_config, with the targets :ffi, :cutlass, :cutlass_mla, :nanobind, :python and
:cuda, the source files of the kernel instances (:instances, :sm90_instances, :sm100_instances) and defs.bzl with the constants that
BUILD.bazel loads. Python is $JAX_MLA_PYTHON, else python3. Nothing is downloaded. Works from WORKSPACE (Bazel 4 and later) and from MODULE.bazel (local_config_extension.bzl).
"""

_DESCRIBE = """
import importlib.util, sys, sysconfig

def package(name):
    spec = importlib.util.find_spec(name)
    return next(iter(spec.submodule_search_locations)) if spec else ""

stable = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(package("jaxlib"))
print(package("cutlass_library"))
print(package("nanobind"))
print(sysconfig.get_paths()["include"])
print(".abi3.so" if stable else sysconfig.get_config_var("EXT_SUFFIX"))
print("Py_LIMITED_API=0x030C0000" if stable else "")
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "ffi",
    hdrs = glob(["jaxlib/xla/ffi/api/*.h"]),
    includes = ["jaxlib"],
)

cc_library(
    name = "cutlass",
    hdrs = glob(["cutlass/**"], allow_empty = True),
    includes = ["cutlass"],
)

cc_library(
    name = "cutlass_mla",
    hdrs = glob(["cutlass_examples/common/*.hpp", "cutlass_examples/77_blackwell_fmha/**/*.hpp"], allow_empty = True),
    includes = ["cutlass_examples/common", "cutlass_examples/77_blackwell_fmha"],
)

cc_library(
    name = "cuda",
    hdrs = glob(["cuda/**"], allow_empty = True),
    includes = ["cuda", "cuda/cccl"],
)

filegroup(
    name = "instances",
    srcs = glob(
        ["instances/**/*.cu"],
        exclude = ["instances/**/sm90/**", "instances/**/sm100/**"],
        allow_empty = True,
    ),
)

filegroup(
    name = "sm90_instances",
    srcs = glob(["instances/**/sm90/**/*.cu"], allow_empty = True),
)

filegroup(
    name = "sm100_instances",
    srcs = glob(["instances/**/sm100/**/*.cu"], allow_empty = True),
)

cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h", "nanobind/ext/**/*.h"]),
    copts = ["-std=c++17", "-fexceptions", "-fno-strict-aliasing", "-fvisibility=hidden", "-w"],
    defines = [%s],
    linkstatic = True,
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    textual_hdrs = glob(["nanobind/src/*.cpp", "nanobind/src/*.h"]),
    deps = [":python"],
)
"""

_DEFS = """
VERSION = "{version}"
EXTENSION_SUFFIX = "{suffix}"
NVCC = "{nvcc}"  # empty: no CUDA
CUDA_VERSION = "{cuda_version}"
CUDA_LIBRARY_DIR = "{cuda_library_dir}"
CUDA_ARCHS = {cuda_archs}
"""

def _version(ctx):
    for line in ctx.read(Label("//:jax_mla/_version.py")).split("\n"):
        if line.startswith("__version__"):
            return line.split("\"")[1]
    fail("jax_mla/_version.py has no __version__")

def _cuda_archs(names):
    """As cmake/cuda.cmake: commas or spaces separate, and who names Hopper wants its kernels (90a)."""
    archs = []
    for name in (names.replace(" ", ",") or "80,90a").split(","):
        arch = name.replace("90", "90a") if name in ("90", "90-real") else name
        if arch and arch not in archs:
            archs.append(arch)
    return archs

def _find_cuda(ctx):
    """Returns (nvcc, toolkit root, version), all empty without CUDA."""
    nvcc = ctx.which("nvcc")
    if ctx.os.environ.get("JAX_MLA_CUDA", "AUTO") == "OFF" or not nvcc:
        return "", "", ""
    dry_run = ctx.execute([nvcc, "--dryrun", "-x", "cu", "/dev/null"])
    tops = [l[len("#$ TOP="):] for l in dry_run.stderr.split("\n") if l.startswith("#$ TOP=")]
    if not tops:
        fail("nvcc --dryrun does not name its toolkit: " + dry_run.stderr)
    release = ctx.execute([nvcc, "--version"]).stdout.split("release ")[1]
    return str(nvcc), tops[0], release.split(",")[0]

def _write_instances(ctx, python):
    """Writes instances/<folder>/<row>.cu for each row of the tables (tools/kernel_instances.py)."""
    script = ctx.path(Label("//:tools/kernel_instances.py"))
    written = ctx.execute([python, script, "instances"])
    if written.return_code != 0:
        fail("%s fails: %s" % (script, written.stderr))
    for line in written.stdout.strip().split("\n"):
        folder = line.split("/instances/")[1].rsplit("/", 1)[0]
        ctx.path(Label("//:%s/instances.inc" % folder))  # a changed table makes this repository anew

def _local_config_impl(ctx):
    python = ctx.os.environ.get("JAX_MLA_PYTHON", "") or str(ctx.which("python3"))
    described = ctx.execute([python, "-c", _DESCRIBE])
    if described.return_code != 0:
        fail("%s cannot be asked for its packages: %s" % (python, described.stderr))
    jaxlib, cutlass, nanobind, include, suffix, define = described.stdout.split("\n")[:6]
    for name, found in [("jaxlib", jaxlib), ("nanobind", nanobind)]:
        if not found:
            fail("%s has no package %s: pip install %s" % (python, name, name))
    nvcc, root, cuda_version = _find_cuda(ctx)
    if nvcc and not cutlass:
        fail("%s has no package cutlass_library: pip install nvidia-cutlass==4.2.0.0" % python)

    ctx.symlink(jaxlib + "/include", "jaxlib")
    ctx.symlink(nanobind, "nanobind")
    ctx.symlink(include, "python")
    if nvcc:
        ctx.symlink(cutlass + "/source/include", "cutlass")
        ctx.symlink(cutlass + "/source/examples", "cutlass_examples")
        ctx.symlink(root + "/include", "cuda")
        _write_instances(ctx, python)
    ctx.file("BUILD.bazel", _BUILD % ("\"%s\"" % define if define else ""))
    ctx.file("defs.bzl", _DEFS.format(
        version = _version(ctx),
        suffix = suffix,
        nvcc = nvcc,
        cuda_version = cuda_version,
        cuda_library_dir = root + "/lib64" if root else "",
        cuda_archs = repr(_cuda_archs(ctx.os.environ.get("JAX_MLA_CUDA_ARCHS", ""))),
    ))

local_config = repository_rule(
    implementation = _local_config_impl,
    local = True,
    environ = ["JAX_MLA_PYTHON", "JAX_MLA_CUDA", "JAX_MLA_CUDA_ARCHS", "PATH"],
)
