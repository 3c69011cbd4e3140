"""Looking at the workspace without leaving it: paths, patterns, walks, pictures. For the jobs that read files."""
