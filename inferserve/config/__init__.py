"""Configuration: argv, files and environment are read here and nowhere else, once, into one frozen `ServerConfig`."""
