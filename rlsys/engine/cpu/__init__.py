"""SGLang on a CPU: the platform plug-in, and replacements of its kernels in plain torch."""
