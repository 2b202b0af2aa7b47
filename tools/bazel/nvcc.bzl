"""nvcc_objects: compiles CUDA sources to object files for a cc_binary's srcs."""

load("@jax_mla_config//:defs.bzl", "NVCC")

_FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
]

def _architecture_flags(arch):
    number = arch.split("-")[0]
    return ["-gencode", "arch=compute_%s,code=sm_%s" % (number, number)]

def _nvcc_objects_impl(ctx):
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
    headers = depset(transitive = [c.headers for c in contexts])
    defines = depset(transitive = [c.defines for c in contexts])
    includes = depset(transitive = [
        directories
        for c in contexts
        for directories in [c.includes, c.system_includes, c.quote_includes]
    ])
    objects = []
    for source in ctx.files.srcs:
        path = source.short_path.replace("../", "")  # of another repository: ../<its name>/...
        object = ctx.actions.declare_file("%s/%s.o" % (ctx.label.name, path))
        args = ctx.actions.args()
        args.add_all(_FLAGS)
        for arch in ctx.attr.archs:
            args.add_all(_architecture_flags(arch))
        args.add_all(defines, before_each = "-D")
        args.add_all(includes, before_each = "-I")
        args.add_all(["-c", source, "-o", object])
        ctx.actions.run(
            executable = NVCC,
            arguments = [args],
            inputs = depset([source], transitive = [headers]),
            outputs = [object],
            mnemonic = "NvccCompile",
            use_default_shell_env = True,
        )
        objects.append(object)
    return [DefaultInfo(files = depset(objects))]

nvcc_objects = rule(
    implementation = _nvcc_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "archs": attr.string_list(mandatory = True),
        "deps": attr.label_list(providers = [CcInfo]),
    },
)
