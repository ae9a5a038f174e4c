"""Harbor (https://github.com/harbor-framework/harbor): harnesses and tasks with verifiers."""
