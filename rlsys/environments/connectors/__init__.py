"""Between environments of other people and `Environment`: one file a package, which imports it when it is made."""
