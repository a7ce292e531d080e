"""SGLang on a CPU: the platform plug-in, and plain torch in the place of its kernels."""
