"""The module extension that makes @jax_mla_config for MODULE.bazel."""

load(":local_config.bzl", "local_config")

def _impl(_ctx):
    local_config(name = "jax_mla_config")

local_config_extension = module_extension(implementation = _impl)
