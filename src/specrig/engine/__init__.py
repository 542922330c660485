"""What is known of SGLang: control calls, limits, the shapes of its errors."""
