"""The kernel IR: vocabulary, builder, text form, verifier and interpreter."""
