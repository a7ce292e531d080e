"""Plug-ins that implement methods of papers, each in a module with the method's name."""
