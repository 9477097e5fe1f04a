"""The real TF Serving API from the operator's side: the config file, and rolling a version out."""
