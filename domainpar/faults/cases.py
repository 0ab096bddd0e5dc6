"""The faults that are defended against: what happens, what becomes of it, how to see it, and the test that shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        number: As it is counted in the documentation.
        fault: What happens.
        outcome: What becomes of it.
        tests: The tests that show it, `file::name`, the file relative to `tests/`.
        inject: What to give the switch to see it oneself; None where another way is described by the fault itself.
        missing: Why there is no test of all of it; empty if there is.
    """

    number: int
    fault: str
    outcome: str
    tests: tuple[str, ...]
    inject: str | None = None
    missing: str = ""


MEETING = "faults/test_meeting_faults.py::"
ENDING = "faults/test_ending_faults.py::"

LAUNCH = (
    Case(
        1,
        "mpiexec of another MPI library than mpi4py's",
        "Refused at once; the hint names the right mpiexec and MPI4PY_LIBMPI. Never N runs of one rank.",
        (
            f"{MEETING}test_another_mpis_launcher_is_refused_at_once",
            "parallel/test_world.py::test_a_library_that_sees_one_process_of_eight_is_refused",
        ),
    ),
    Case(
        2,
        "No MPI library",
        "Under mpiexec refused, with what to install; a single process runs.",
        (f"{MEETING}test_without_an_mpi_library_mpiexec_is_refused_and_one_process_works",),
    ),
    Case(
        3,
        "Open MPI as root, or more ranks than cores",
        "`doctor` gives the exact flag.",
        ("diagnosis/test_launcher_checks.py::test_open_mpi_is_given_its_flags",),
    ),
    Case(
        4,
        "Another number of ranks than --ranks says",
        "Refused: config wants 8 ranks, 1 started.",
        (f"{MEETING}test_another_number_of_ranks_than_asked_for_is_refused",),
    ),
    Case(
        5,
        "More ranks than nodes, or a part that METIS left empty",
        "It runs, with a note; --strict refuses.",
        (
            "training/test_bad_events.py::test_strict_refuses_an_event_of_which_a_rank_would_own_nothing",
            "training/test_run.py::test_more_ranks_than_tiles_run_and_it_is_said_who_owns_nothing",
        ),
    ),
    Case(
        6,
        "The port is taken, or MASTER_PORT is stale",
        "Under mpiexec a free port is found; a port that was given by hand is named.",
        (
            f"{MEETING}test_a_port_that_is_taken_is_named",
            f"{MEETING}test_under_mpiexec_a_stale_port_is_not_even_looked_at",
        ),
    ),
    Case(
        7,
        "A rank never starts",
        "After --join-timeout the missing ranks are named, and those that came.",
        (
            f"{MEETING}test_ranks_that_never_start_are_named",
            f"{MEETING}test_a_rank_zero_that_never_starts_is_named",
        ),
    ),
    Case(
        8,
        "Another configuration, checkout or torch on one rank",
        "Refused before work; rank, name and both values are told.",
        (
            f"{MEETING}test_another_configuration_on_one_rank_is_refused_with_both_values",
            f"{MEETING}test_another_checkout_on_one_rank_is_refused",
            f"{MEETING}test_another_torch_on_one_rank_is_refused",
        ),
    ),
    Case(
        9,
        "A host name that does not resolve, or the wrong network interface",
        "Ranks of one machine use its loopback, others the interface that leads to rank 0; errors name the interface "
        "and GLOO_SOCKET_IFNAME.",
        (
            f"{MEETING}test_a_host_whose_own_name_does_not_resolve_is_no_trouble",
            f"{MEETING}test_a_name_that_does_not_resolve_is_named",
            "faults/test_two_hosts.py::test_two_hosts_train_to_the_bits_of_one",
        ),
    ),
    Case(
        10,
        "--device cuda without a GPU for each rank",
        "Refused, with the local rank and the GPUs seen; never a shared GPU without --share-gpu.",
        (
            f"{MEETING}test_a_gpu_that_is_not_there_is_refused",
            "parallel/test_world.py::test_ranks_without_a_gpu_of_their_own_are_refused_for_nccl",
        ),
    ),
)

CONFIG = (
    Case(
        11,
        "An unknown key, a wrong type, a bad choice, broken YAML",
        "Key or line named, once, exit code 2.",
        (
            "commands/test_flags.py::test_refused_flags_name_the_flag_and_what_to_do",
            "commands/test_flags.py::test_refused_files_name_the_file_the_key_and_what_to_do",
            "commands/test_flags.py::test_four_ranks_speak_with_one_voice_under_mpiexec",
        ),
    ),
    Case(
        12,
        "A configuration file that is empty, or gives a key twice",
        "Refused: config is empty, with its path; the key with both its lines.",
        (
            "commands/test_flags.py::test_refused_files_name_the_file_the_key_and_what_to_do",
            "commands/test_flags.py::test_a_key_given_twice_in_a_file_is_refused_with_both_lines",
        ),
    ),
    Case(
        13,
        "A path that is missing or cannot be written, a full disk at the start",
        "Path and reason, before work.",
        (
            "training/test_rundir.py::test_a_disk_that_is_full_is_found_before_training_and_nothing_is_left",
            "training/test_rundir.py::test_a_file_in_the_way_is_named",
        ),
    ),
    Case(
        14,
        "The output directory holds another run",
        "Refused unless --resume or --overwrite.",
        (
            "training/test_rundir.py::test_another_run_is_refused_and_left_as_it_is",
            "training/test_rundir.py::test_files_that_are_no_run_are_never_removed",
            "training/test_rundir.py::test_resume_auto_begins_where_there_is_nothing_and_goes_on_where_there_is_a_checkpoint",
        ),
    ),
    Case(
        15,
        "Sectors without an exchange (naive mode)",
        "Allowed; labelled approximate wherever results appear.",
        (
            "training/test_naive.py::test_where_edges_are_cut_naive_mode_gives_another_answer_and_counts_them",
            "training/test_record.py::test_the_printed_line_leaves_out_what_is_not_known_and_says_what_is_approximate",
            "display/test_html_pages.py::test_whatever_is_naive_is_called_approximate",
        ),
    ),
)

EVENTS = (
    Case(
        16,
        "A stored event is truncated, empty or no zip",
        "Named; --on-bad-event skip leaves it out everywhere.",
        (
            "training/test_bad_events.py::test_a_bad_event_is_left_out_alike_on_any_grid_of_ranks",
            "training/test_bad_events.py::test_what_one_rank_alone_cannot_read_is_left_out_by_all",
            "training/test_bad_events.py::test_a_rank_that_cannot_read_says_so_and_the_others_do_not",
            "training/test_bad_events.py::test_the_report_says_what_was_left_out",
            "commands/test_infer.py::test_an_event_that_cannot_be_read_is_left_out_by_all_ranks_and_listed",
        ),
    ),
    Case(
        17,
        "One flipped bit in a stored event",
        "Noticed when read, with event and array.",
        (
            "events/test_flipped_bits.py::test_a_flipped_bit_of_an_event_is_found_or_changes_nothing",
            "events/test_flipped_bits.py::test_no_bit_of_many_of_an_event_flips_in_silence",
            "events/test_flipped_bits.py::test_a_flipped_bit_anywhere_in_an_event_is_found_by_its_hash",
        ),
    ),
    Case(
        18,
        "An array or a chunk is missing, another type, shape or version",
        "Named: expected and found.",
        (
            "events/test_store.py::test_an_event_that_lost_a_member_is_refused",
            "events/test_store.py::test_arrays_of_zeros_are_stored_and_pass_the_check_for_missing_chunks",
            "events/test_store.py::test_an_array_of_another_shape_or_type_than_described_is_refused",
            "events/test_hostile_files.py::test_an_event_that_claims_absurd_sizes_is_refused_before_anything_is_allocated",
        ),
    ),
    Case(
        19,
        "A hostile pickle called .pyg or .pt",
        "Nothing of it runs; what it asks for is listed; no switch.",
        (
            "events/test_hostile_files.py::test_of_all_hostile_files_none_is_run_and_what_pickles_ask_for_is_named",
            "test_no_unsafe_reading.py::test_nothing_in_the_program_can_run_what_a_file_says",
        ),
    ),
    Case(
        20,
        "acorn's .pyg with numpy scalars or string ids",
        "Loads by the allow-list.",
        (
            "events/test_acorn_reader.py::test_numpy_values_and_strings_need_no_permission",
            "events/test_pyg.py::test_a_pyg_data_is_read_even_with_numpy_values_and_strings_in_it",
        ),
    ),
    Case(
        21,
        "An edge that names no node, a wrong shape or type",
        "Refused when read in, the first bad edge named.",
        (
            "events/test_pyg.py::test_bad_graphs_are_refused_with_event_and_file",
            "events/test_acorn_reader.py::test_bad_events_are_refused_with_event_and_file",
            "events/test_heptrkx.py::test_bad_graphs_are_refused_with_event_and_file",
        ),
    ),
    Case(
        22,
        "NaN or infinite features, hits on the beam, phi beyond pi, positions in cm, momenta in MeV",
        "NaN and infinity refused, phi wrapped; of values that cannot be right `prepare` warns, once for a store.",
        (
            "reco/test_facts.py::test_what_cannot_be_right_is_named_with_the_values_and_what_is_right_is_not",
            "events/test_trackml.py::test_bad_files_are_refused_with_event_and_file",
            "events/test_acorn_reader.py::test_phi_from_0_to_two_pi_is_wrapped",
            "events/test_construct.py::test_features_stay_finite_and_clamped_at_equal_radius_and_on_the_beam",
            "partitioners/test_sectors.py::test_hits_on_the_beam_axis_lie_in_the_outer_slices_in_eta",
        ),
    ),
    Case(
        23,
        "Duplicate hits or edges, self-loops, isolated nodes, both directions",
        "As on one rank.",
        ("training/test_odd_events.py::test_a_step_on_an_odd_event_is_to_the_last_bit_that_of_one_rank",),
    ),
    Case(
        24,
        "No nodes, no edges, one node, all nodes in one sector",
        "Forward, backward and step as on one rank.",
        ("training/test_odd_events.py::test_a_step_on_an_odd_event_is_to_the_last_bit_that_of_one_rank",),
    ),
    Case(
        25,
        "A sector border at phi = pi",
        "Edges across are cut edges like any other.",
        (
            "training/test_odd_events.py::test_edges_across_the_seam_are_edges_of_the_halo",
            "training/test_odd_events.py::test_a_step_on_an_odd_event_is_to_the_last_bit_that_of_one_rank",
        ),
    ),
    Case(
        26,
        "METIS fails",
        "An error, never another method in silence.",
        ("partitioners/test_metis.py::test_a_failure_of_metis_is_an_error_and_never_another_method",),
    ),
    Case(
        27,
        "No labels",
        "Inference works; prepare tells the events; training refuses by name, or leaves them out with "
        "--on-bad-event skip.",
        (
            "training/test_parts.py::test_an_event_without_truth_is_refused_by_name",
            "training/test_bad_events.py::test_events_without_truth_are_left_out_as_if_they_were_not_there",
            "commands/test_bad_input.py::test_prepare_tells_which_events_have_no_truth_and_what_comes_next",
            "commands/test_bad_input.py::test_events_that_will_not_do_are_named_and_nothing_is_written",
        ),
    ),
    Case(
        28,
        "An event much larger than the others",
        "Its memory is told before the first step, with a warning.",
        (
            "training/test_largest_event.py::test_the_largest_event_is_named_with_its_part_before_the_first_step",
            "training/test_largest_event.py::test_where_it_will_not_fit_the_warning_comes_before_the_first_step",
        ),
    ),
)

RUNNING = (
    Case(
        29,
        "An exception on one rank",
        "All ranks are gone within a second or two; one traceback; rank, host, event, step and phase named.",
        (
            f"{ENDING}test_an_error_on_one_rank_ends_all_and_names_rank_step_phase_and_event",
            f"{ENDING}test_an_error_anywhere_ends_eight_ranks",
            "parallel/test_ending.py::test_without_help_from_a_launcher_an_error_ends_even_those_that_compute",
        ),
        "rank=1,at=forward,step=2,do=raise",
    ),
    Case(
        30,
        "kill -9 of one rank",
        "All ranks are gone within seconds; the last checkpoint and all events load.",
        (f"{ENDING}test_a_killed_rank_ends_all_and_nothing_is_lost",),
        "rank=1,at=halo_bwd:0,step=2,do=kill",
    ),
    Case(
        31,
        "kill -9 of mpiexec or torchrun",
        "No rank outlives it.",
        (f"{ENDING}test_ranks_do_not_outlive_a_killed_launcher",),
    ),
    Case(
        32,
        "Out of memory on one rank",
        "Named with layer, event, nodes and ghosts, and what to try.",
        (
            "training/test_out_of_memory.py::test_in_a_forward_pass_the_layer_is_named",
            "training/test_out_of_memory.py::test_in_a_backward_pass_too",
            "training/test_out_of_memory.py::test_how_large_the_part_is_and_what_to_try",
            "training/test_out_of_memory.py::test_while_an_event_is_loaded_and_in_numpy",
        ),
        "rank=1,at=forward,step=1,do=oom",
    ),
    Case(
        33,
        "A rank hangs, is frozen or cut off",
        "After --timeout all end; the board shows every rank, first the one the others wait for, with the line it is "
        "in.",
        (
            f"{ENDING}test_a_rank_that_hangs_is_named_first_with_the_line_it_is_in",
            f"{ENDING}test_a_rank_that_is_frozen_is_named",
            "faults/test_two_hosts.py::test_a_pulled_cable_is_noticed_and_the_ranks_behind_it_are_named",
            "faults/test_board.py::test_who_the_others_wait_for",
        ),
        "rank=1,at=forward,step=2,do=sleep:1000",
    ),
    Case(
        34,
        "A rank that is slow",
        "A warning that names it, once it has been slow for 20 steps.",
        (
            "training/test_stragglers.py::test_a_rank_that_is_slow_for_20_steps_is_told_of_once",
            "training/test_stragglers.py::test_a_run_prints_and_keeps_it",
        ),
    ),
    Case(
        35,
        "Plans that do not belong together",
        "Refused before the first exchange; sender and receiver named.",
        ("faults/test_plan_faults.py::test_a_wrong_plan_on_one_rank_is_named_with_both_sides",),
        "rank=1,at=plan,do=swap",
    ),
    Case(
        36,
        "Another precision on one rank",
        "Refused before work (8). In a program of one's own no transport takes such rows for its own.",
        (
            f"{MEETING}test_another_configuration_on_one_rank_is_refused_with_both_values",
            "faults/test_checked_calls.py::test_gloo_never_takes_rows_of_another_width_for_its_own",
            "faults/test_checked_calls.py::test_rows_of_another_type_are_named",
        ),
    ),
    Case(
        37,
        "A rank skips a layer, a backward pass or a call of the API",
        "A call of the API (model, part.sum, split_graph, sum_gradients) is named at the next one, or when the rank "
        "closes, with the lines of the program on both sides. What is skipped inside of a pass is named at the "
        "deadline; with DOMAINPAR_CHECK_CALLS=1 at the first call that differs.",
        (
            "faults/test_checked_calls.py::test_a_rank_that_skips_something_is_named_at_once",
            "faults/test_skipped_calls.py::test_a_call_of_some_ranks_only_is_named_with_both_places_at_the_next_call",
            "faults/test_skipped_calls.py::test_a_rank_that_ends_while_another_waits_for_it_is_named_soon",
        ),
    ),
    Case(
        38,
        "A loss or gradient that is not finite",
        "All stop alike, before any parameter changes; layer, rank and event named.",
        (
            "training/test_not_finite.py::test_the_layer_that_began_it_is_named_with_rank_and_event",
            "training/test_not_finite.py::test_a_gradient_that_is_not_finite_is_named_by_its_layer",
            "training/test_not_finite.py::test_parameters_that_a_step_has_spoilt_end_it_on_every_rank",
            "training/test_keeping.py::test_what_is_not_finite_is_never_saved_and_the_rank_that_has_it_is_named",
        ),
        "rank=1,at=loss,step=2,do=nan",
    ),
    Case(
        39,
        "One rank's parameters drift by one bit",
        "All stop at the next check; rank and parameter named.",
        (
            "training/test_replicas.py::test_one_ulp_in_one_parameter_on_one_rank_is_found_and_the_rank_named",
            "training/test_replicas.py::test_no_checkpoint_is_written_of_replicas_that_differ",
            "training/test_replicas.py::test_a_drifting_optimiser_is_found_before_it_drives_parameters_apart",
        ),
        "rank=1,at=stepped,step=2,do=flip",
    ),
    Case(
        40,
        "SIGUSR1 to mpiexec or to one rank",
        "All stop at the same step with a checkpoint, exit code 0; resumed to the same bits.",
        (
            "commands/test_interrupted.py::test_a_signal_to_the_launcher_stops_all_ranks_at_one_step_and_the_run_goes_on_to_the_same_bits",
            "commands/test_interrupted.py::test_one_of_two_processes_that_gets_sigusr1_stops_both_with_a_checkpoint_to_go_on_from",
            "training/test_run.py::test_one_rank_that_is_asked_to_stop_stops_all_and_the_run_goes_on_to_the_same_bits",
        ),
        "rank=1,at=forward,step=2,do=signal:USR1",
    ),
    Case(
        41,
        "SIGTERM, scancel, Ctrl-C",
        "The same, if there is time; a second Ctrl-C ends at once; one line.",
        (
            "commands/test_interrupted.py::test_a_signal_to_the_launcher_stops_all_ranks_at_one_step_and_the_run_goes_on_to_the_same_bits",
            "commands/test_interrupted.py::test_ctrl_c_after_a_first_signal_ends_at_once_with_one_line",
            "training/test_keeping.py::test_a_run_that_was_asked_to_stop_and_cannot_save_does_not_call_itself_preempted",
        ),
    ),
    Case(
        42,
        "A signal while ranks meet or a checkpoint is written",
        "Nothing is spoilt.",
        (
            "commands/test_interrupted.py::test_a_signal_at_an_awkward_moment_stops_the_run_at_the_next_step_with_a_whole_checkpoint",
        ),
        "rank=0,at=save:files,do=signal:USR1",
    ),
    Case(43, "A worker that loads data dies", "", (), missing="there is none: ranks load their parts themselves"),
)

KEEPING = (
    Case(
        44,
        "kill -9 while a checkpoint is written",
        "The one before or the new one loads.",
        (
            "training/test_killed_while_saving.py::test_whenever_a_process_is_killed_while_it_saves_the_run_loads",
            "training/test_killed_while_saving.py::test_fifty_kills_while_saving_leave_no_run_that_does_not_load",
            "training/test_killed_while_saving.py::test_a_process_that_is_killed_at_a_place_of_saving_leaves_what_loads",
        ),
        "rank=0,at=save:rename,do=kill",
    ),
    Case(
        45,
        "The newest checkpoint is damaged",
        "Said, and the one before is taken; --strict-resume refuses.",
        (
            "training/test_checkpoint.py::test_if_the_newest_checkpoint_is_damaged_all_ranks_take_the_one_before_and_it_is_said_once",
            "training/test_checkpoint.py::test_strict_refuses_in_place_of_taking_another",
            "training/test_checkpoint.py::test_if_none_is_good_all_are_named",
            "training/test_killed_while_saving.py::test_no_flipped_bit_goes_unseen_and_the_checkpoint_before_is_used",
            "training/test_keeping.py::test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_to_the_same_bits",
        ),
    ),
    Case(
        46,
        "Resumed with other ranks, grouping or domain size",
        "The same bits; another mode works too.",
        (
            "training/test_run.py::test_a_run_goes_on_with_another_grouping_or_domain_size_to_the_same_bits",
            "training/test_run.py::test_a_run_goes_on_in_another_mode_with_the_state_of_its_optimiser",
            "commands/test_train.py::test_a_run_goes_on_as_it_began_but_on_the_ranks_that_there_are",
        ),
    ),
    Case(
        47,
        "The disk is full while a checkpoint is written",
        "A warning; training goes on, the old one stays.",
        (
            "training/test_keeping.py::test_a_full_disk_costs_a_checkpoint_and_not_the_run",
            "training/test_keeping.py::test_a_run_whose_last_checkpoint_could_not_be_saved_has_failed",
            "training/test_keeping.py::test_lines_of_metrics_that_a_full_disk_does_not_take_are_counted_and_training_goes_on",
        ),
        "rank=0,at=save,do=full",
    ),
    Case(
        48,
        "Two runs in one directory, two preparations of one store",
        "The second is refused; a stale lock is explained.",
        (
            "test_lock.py::test_a_second_run_is_refused_naming_host_and_process",
            "test_lock.py::test_the_lock_of_a_process_that_is_gone_is_taken_over_and_it_is_said",
            "test_lock.py::test_a_run_on_another_host_is_never_taken_over_but_it_is_said_what_to_check_and_to_remove",
            "test_lock.py::test_of_runs_that_start_at_once_exactly_one_wins",
            "events/test_preparing.py::test_a_second_preparation_is_refused_at_once_on_all_ranks_and_a_reader_is_not",
        ),
    ),
)

CASES: dict[str, tuple[Case, ...]] = {
    "Launch and environment": LAUNCH,
    "Configuration": CONFIG,
    "Event data": EVENTS,
    "Run time": RUNNING,
    "Checkpoints and output": KEEPING,
}  # fmt: skip
