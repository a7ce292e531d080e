"""Methods of papers, as plug-ins of the objective and of group policies."""
