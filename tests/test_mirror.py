"""Tests mirror the packages: `tests/<package>/test_<module>.py`, or a file that is listed here with its reason."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "agentlightning"

FOLDERS = {
    "chaos": "kills, cuts and fills up whole servers and runs",
    "deploy": "the recipes of deploy/",
    "drift": "tokenizers, templates and agents against the adapter and the gateway together",
    "environments/harbor_agent": "agentlightning/environments/harbor with Harbor itself, in an environment of its own",
    "examples": "the programs of examples/ and contrib/recipes/, and what their READMEs show",
    "frameworks": "agents of other frameworks, through gateway, runner and adapter",
    "packaging": "the wheel, its installation, and the files of the repository around the package",
    "seeds": "the documents, snippet by snippet, word for word",
    "store/conformance": "what every store promises, by kinds of work; runs on each backend and over HTTP",
    "training/conformance": "what every algorithm that trains weights promises of a run",
    "typing": "programs of users, as their type checkers see them",
}
"""Folders whose tests belong to no one package, and what they are for."""

FILES = {
    "a whole run, or a promise of several modules": """
        environments/test_harbor_absent
        emitter/test_values engine/test_families engine/test_smolagents engine/vllm_engine/test_signatures
        engine/vllm_engine/test_vllm_run execution/test_endings execution/test_endings_table execution/test_lone_runner
        execution/test_main_thread execution/test_never_hangs execution/test_several_machines legacy/test_legacy
        prompt_search/test_proof prompt_search/test_resumed runner/test_hostile runner/test_iter runner/test_killed
        runner/test_left_behind runner/test_lost_replies runner/test_threads runner/test_tracers test_architecture
        test_dependencies test_documents test_imports test_mirror test_one_rollout test_readme test_secrets_apart
        tracer/test_hidden_keys tracer/test_stress trackers/test_packages trainer/test_constructor
        trainer/test_evaluate trainer/test_fit trainer/test_rollout_config trainer/test_specs
        training/external/test_before_a_run training/external/tinker/test_tinker training/external/trl/test_trl_run
        training/external/verl/test_verl training/external/verl/test_verl_run training/learner/test_precision
        training/losses/test_golden training/test_proofs training/test_grpo_alarms
        training/test_grpo_family training/test_grpo_faults training/test_grpo_flight training/test_grpo_gpu
        training/test_grpo_ledger training/test_grpo_records training/test_grpo_run
        training/test_policies_run training/test_ppo_run training/test_sft_run
        utils/test_every_server
    """,
    "what a client of the gateway sees, whichever module does it": """
        llm_proxy/access/test_budget llm_proxy/dialects/test_every_dialect llm_proxy/recording/test_privacy
        llm_proxy/recording/test_record_size llm_proxy/test_bounds_of_work llm_proxy/test_faults
        llm_proxy/test_faults_kill llm_proxy/test_keys llm_proxy/test_malformed llm_proxy/test_refusals
        llm_proxy/test_store_faults llm_proxy/test_streams llm_proxy/test_what_agents_see_of_endpoints
    """,
    "what a store or its server promises, on several backends": """
        store/test_atomicity store/test_damage store/test_differential store/test_faults
        store/test_late_copies_other_server store/test_model store/test_named_claims store/test_number_bounds
        store/test_otlp_attacks store/test_overridden store/test_own_store store/test_processes store/test_promises
        store/test_server_bounds store/test_server_doors store/test_surface
        store/test_upgrades store/test_versions store/test_wire
    """,
    "a page of the documents, its programs and its promises": """
        adapter/test_drawn_seam adapter/test_worked_examples cli/test_guides cli/test_pages contrib/test_pages
        environments/test_gymnasium_page
        chat/test_pages litagent/test_any_program_page llm_proxy/test_gateway_documents prompt_search/test_pages
        store/test_store_documents trainer/test_pages trainer/test_running_promises trainer/test_tutorials
        legacy/v03/test_pages
    """,
    "the page as a browser shows it": """
        dashboard/test_frame dashboard/test_hostile dashboard/test_lists dashboard/test_one_rollout
        dashboard/test_rollouts dashboard/test_run_views dashboard/test_scripts dashboard/test_tokens
        dashboard/test_whole
    """,
    "what runs the tests": """
        test_in_turn test_unsteady
    """,
    "commands as a shell runs them, several at a time": """
        cli/test_hostile_names cli/test_looking cli/test_monitoring cli/test_serve cli/test_serving_commands
    """,
}
"""The reason, and the files that it applies to."""


def names_no_module(file: str) -> bool:
    """True for a test file without a module or package of its name in the same folder of the package."""
    folder, _, name = file.rpartition("/")
    module = PACKAGE / folder / name.removeprefix("test_")
    return not (module.with_suffix(".py").is_file() or module.is_dir())


def test_every_test_file_has_the_name_of_its_module_or_is_listed_with_a_reason() -> None:
    files = [path.relative_to(TESTS).with_suffix("").as_posix() for path in TESTS.rglob("test_*.py")]
    own = [file for file in files if not any(file.startswith(f"{folder}/") for folder in FOLDERS)]
    listed = {file for files in FILES.values() for file in files.split()}
    assert sorted(file for file in own if names_no_module(file)) == sorted(listed)
    assert [folder for folder in FOLDERS if not (TESTS / folder).is_dir()] == []
