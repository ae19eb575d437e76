"""What the gate leaves to `make test-full`, and why: each is a sweep, or shows again what a cheaper test shows.

Tests by the beginning of their name. `conftest.py` gives them the marker `full`; `docs/test_gate.py` fails for a line
that no test has. Sweeps that were made for the full run carry the marker themselves. CPU seconds are of one core.
"""

from __future__ import annotations

FULL: dict[str, str] = {
    "tests/bench/test_autoscaling.py::test_a_ramp_is_attained_with_fewer_gpus_than_a_static_fleet":
        "7 s: a figure of the benchmark; the planner's own tests and the replay's stay",
    "tests/bench/test_autoscaling.py::test_replicas_that_do_both_attain_a_ramp_with_fewer_gpus_than_a_static_fleet":
        "7 s: as the one above, for the other kind of fleet",
    "tests/bench/test_routing.py::test_four_gateways_serve_agents_as_one_does":
        "1 s: a figure of the benchmark; that four gateways hit as one does stays",
    "tests/cluster/test_lanes.py::test_pytest_xdist_keeps_a_group_in_one_lane":
        "5 s: three processes of pytest; how groups are written stays, and every run of the e2e suite goes by them",
    "tests/bench/gpu/test_parts.py::test_failing_tests_are_named_and_run_again_with_blocking_launches":
        "3 s: a tool for machines with a GPU; its other parts stay",
    "tests/bench/gpu/test_parts.py::test_tests_that_all_skip_themselves_are_wrong_on_a_gpu":
        "3 s: as the one above",
    "tests/bench/gpu/test_dry_run.py::test_variants_and_tools":
        "3 s: as the one above",
    "tests/tandem_operator/rollout/test_rollout_plan.py::test_random_histories[1]":
        "2 s: the smallest and the last shape of a fleet stay",
    "tests/tandem_operator/rollout/test_rollout_plan.py::test_random_histories[2]": "3 s: as the one above",
    "tests/tandem_operator/rollout/test_rollout_plan.py::test_random_histories[3]": "2 s: as the one above",
    "tests/tandem_operator/rollout/test_rollout_plan.py::test_random_histories[4]": "3 s: as the one above",
    **{
        "tests/tandem_operator/rollout/test_partners.py::test_a_role_that_is_added_or_removed_costs_no_more_than_the_promise"
        f"[{budget}-{shape}]": "1 s each: every budget and every shape stays once, their product goes"
        for budget, kept in (("0-VLLM", "1-1"), ("1-Tandem", "1-3"), ("2-VLLM", "2-4"), ("3-Tandem", "3-2"))
        for shape in ("1-1", "1-3", "2-4", "3-2")
        if shape != kept
    },
    "tests/bench/test_routing.py::test_four_gateways_hit_as_one_does[True-False-0.03]":
        "1 s in two: with all that gateways tell each other, and with nothing of it, it stays",
    "tests/bench/test_routing.py::test_one_gateway_computes_no_system_prompt_everywhere":
        "2 s: a figure of the benchmark; that four gateways hit as one does stays",
    "tests/tandem_sim/test_capacity.py::test_the_planner_is_economical_under_steady_load[2]":
        "1 s: the same under another seed",
    **{
        f"tests/tandem_worker/engine/test_head.py::test_guesses_are_those_of_an_independent_reference[{kind}]":
            "1 s in three: where a name, a key or a layer stands in a checkpoint; reading it is tested by itself, and"
            " each way to compute stays"
        for kind in ("layers.0", "own embedding", "other layers", "another base", "speculators")
    },
    **{
        f"tests/tandem_worker/engine/test_speculation.py::test_all_kinds_at_once_with_room_and_without[{case}]":
            "1 s in two: every two of room, memory of the host and restraint stay, all three together go"
        for case in ("False-0-200", "False-30-40", "True-0-40", "True-30-200")
    },
    **{
        f"tests/tandem_worker/engine/execute/test_host_pool.py::test_answers_under_pressure_are_those_without_it[{case}]":
            "1 s in two: each amount of memory stays, with steps that run ahead or without"
        for case in ("1-False", "12-True", "200-False")
    },
    **{
        "tests/tandem_worker/engine/test_pd_equals_unified.py::"
        f"test_tokens_equal_those_of_one_engine_and_of_transformers[{family}]":
            f"1 s in two: its blocks are those of {other}, which stays"
        for family, other in (("smollm2", "llama3"), ("kimi-k2", "deepseek-v3"))
    },
    "tests/tandem_worker/model/backends/test_rows.py::test_rows_have_the_same_bits_however_they_come[qwen3]":
        "1 s in three: gpt_oss has its window",
    "tests/tandem_worker/model/backends/test_rows.py::test_rows_that_are_checked_have_the_bits_of_decoded_ones[qwen3]":
        "1 s in two: as the one above",
    "tests/tandem_worker/model/test_weighing.py::test_a_real_model_has_the_bytes_of_its_parameters":
        "1 s: small models of every family are weighed",
    "tests/tandem_worker/transfer/test_groups.py::test_every_rank_gets_its_share_through_mooncake[TP2-TP4]":
        "1 s: from two ranks to two others stays; which share is whose does not depend on the transport",
    "tests/tandem_worker/group/test_group_heads.py::test_ranks_guess_what_one_process_guesses[TP2]":
        "3 s of three processes: under TP2 a model's own module guesses, and under PP2 a head",
    "tests/tandem_worker/kernels/on_device/test_split_byte.py::test_experts[False":
        "1 s in the interpreter: with a map of experts it stays",
    "tests/tandem_sim/test_cli.py::test_it_finds_the_smallest_fleet_that_attains":
        "4 s: the search is tested by itself in test_capacity.py",
    "tests/bench/test_baselines.py::test_in_the_simulator_it_follows_a_jump_and_comes_back":
        "2 s: a baseline of the benchmark",
    "tests/tandem_worker/engine/execute/test_arena.py::test_counting_does_not_load_the_compiler":
        "2 s of a process of its own: process/test_imports.py shows it of a worker that serves",
    "tests/tandem_worker/host/test_postponed.py::test_what_is_left_comes_when_it_is_asked_for":
        "5 s: torch whole and in parts, in two processes, which differ with torch's release alone; that another one is"
        " imported whole, and that what is left comes when a model asks for it, stay",
    "tests/tandem_worker/host/test_environment.py::test_compiled_products_take_bounded_memory":
        "5 s: hundreds of shapes; that the bound is set is tested by itself",
    "tests/tandem_worker/kernels/test_compiles_for_hopper.py::test_matrix_kernels[mla_decode_attention of one rank's":
        "3 s: the same kernel for fewer heads",
    "tests/tandem_worker/kernels/test_compiles_for_hopper.py::test_matrix_kernels[paged_decode_attention with window":
        "1 s: the same kernel with options, which the interpreter runs",
    "tests/tandem_worker/kernels/test_compiles_for_hopper.py::test_matrix_kernels[small_batch_linear of logits]":
        "1 s: the same kernel for another shape",
    **{
        f"tests/tandem_worker/kernels/on_device/test_moe.py::test_fused_moe[float16-{form}-{mapped}]":
            "1 s each in the interpreter: every form of weights stays once, with a map of experts or without"
        for form, mapped in (("plain", False), ("fp8", True), ("int4", False), ("mxfp4", True))
    },
    "tests/tandem_worker/kernels/on_device/test_moe.py::test_fused_moe_of_one_rank_with_biases[float32":
        "1 s in the interpreter: float16 stays",
    **{
        f"tests/tandem_worker/kernels/on_device/test_paged_attention.py::test_decode_attention[float16-{options}]":
            "1 s in four, in the interpreter: every option stays in several splits, their product goes"
        for options in ("{'window': 20}-3", "{'chunk': 32}-3", "{'sinks': True}-1", "{'window': 5, 'sinks': True}-1")
    },
    **{
        "tests/tandem_worker/kernels/on_device/test_paged_attention.py::"
        f"test_a_row_has_the_same_bits_in_every_batch_and_table[float16-{options}]":
            "1 s in the interpreter: the same kernel with sinks stays"
        for options in ("{}", "{'window': 300}")
    },
    **{
        "tests/tandem_worker/kernels/on_device/test_paged_attention.py::"
        f"test_a_guess_has_the_bits_of_a_decoded_token[float16-(2, 1)-{options}]":
            "1 s in the interpreter: in several splits, and with a window, it stays"
        for options in ("{'sinks': True}", "{'window': 300}", "{'chunk': 256}")
    },
    **{
        f"tests/tandem_worker/kernels/on_device/test_paged_attention.py::test_tokens_with_guesses_behind_them[float16-{options}]":
            "1 s in the interpreter: with sinks, and with a chunk, it stays"
        for options in ("{'num_splits': 3}", "{'window': 20}")
    },
    "tests/tandem_worker/kernels/on_device/test_sampling.py::test_equals_are_ranked_by_id[1]":
        "3 s in the interpreter: the same with another seed",
    "tests/tandem_worker/kernels/on_device/test_sampling.py::test_draws_among_equals_reach_the_lowest_ids_alone[50-1.0":
        "1 s in the interpreter: the other case stays",
    "tests/tandem_worker/model/tokenization/test_gguf.py::test_files_that_contradict_themselves[changes4]":
        "3 s of a process that imports transformers: that what it cannot convert ends a start in words is shown of a"
        " folder (test_conversion.py)",
    "tests/tandem_worker/model/tokenization/test_folder.py::test_a_sentencepiece_class_is_converted":
        "1 s of a process that imports transformers: the same files are converted in test_conversion.py",
    "tests/tandem_worker/model/backends/native/test_split.py::test_the_demo_model_takes_two_thirds_of_the_memory_and_answers_the_same":
        "1 s: small models of every family answer the same, and how few bits a real matrix takes stays (test_forms.py)",
    "tests/tandem_worker/model/test_tokenizer.py::test_folder_without_a_tokenizer":
        "1 s of a process that imports transformers: another folder that is no tokenizer stays (test_conversion.py)",
    "tests/tandem_worker/process/test_telemetry.py::test_the_velocity_is_that_of_busy_time_and_survives_idle_time":
        "20 s of a worker under load: the engine's own tests of its velocity stay",
    "tests/tandem_worker/process/test_watchdog.py::test_a_step_timeout_of_zero_lets_steps_hang":
        "6 s: a start from nothing for a limit that is switched off; a step that hangs and a slow one stay",
}  # fmt: skip


def reason_of(nodeid: str) -> str | None:
    """Why a test is left to the full run; None where it is of the gate."""
    return next((reason for name, reason in FULL.items() if nodeid.startswith(name)), None)
