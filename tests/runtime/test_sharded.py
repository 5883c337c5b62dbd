"""The sharded optimizer on real processes, beside torch's DDP with the plain one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(550)  # of processes that may share their cores
RANKS = "tests.runtime.shard_ranks"


TRAINED = [
    "optimizers",
    "modes",
    "clipped",
    "tuned",
    "planned",
    "plans_in_force",
    "viewed",
    "noted",
    "observed",
    "copied",
]
READ = ["readers", "delays", "races", "compiled", "scripted", "ordered", "warned", "aliased", "interrupted"]
KEPT = [
    "states",
    "scheduled",
    "misfit",
    "by_torchs_functions",
    "hooked",
    "named",
    "checkpointed",
    "load_otherwise",
    "edited",
]
ODD = ["refused", "loud", "odd", "again", "ended", "skipped", "thawed", "raised", "static_later"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw; in two runs, neither of which takes long on a busy machine."""
    first = run_ranks(RANKS, TRAINED, tmp_path_factory.mktemp("trained"), 2)
    second = run_ranks(RANKS, [*READ, *KEPT, *ODD], folder_of_two(tmp_path_factory), 2)
    return [{**some, **others} for some, others in zip(first, second, strict=True)]


def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "two"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def four(two: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 4 ranks saw, which also take the state that the 2 wrote."""
    assert two
    folder = tmp_path_factory.mktemp("four")
    copy_states(folder_of_two(tmp_path_factory), folder)
    return run_ranks(RANKS, ["in_single", "in_double", "resumed"], folder, 4)


def copy_states(source: Path, folder: Path) -> None:
    """Copy what ranks have saved to where others, who meet there, will look for it."""
    for one in source.iterdir():
        if one.name.startswith("checkpoint") or one.name == "state.pt":
            (shutil.copytree if one.is_dir() else shutil.copy)(one, folder / one.name)


def test_after_30_steps_parameters_are_bitwise_those_of_the_plain_optimizer_at_2_ranks(two: list[Any]) -> None:
    for found in two:
        # Torch's fused kernel for CPUs rounds what is left at the end of a tensor otherwise than what goes before it.
        assert found["optimizers"].pop("AdamW fused", 0.0) < 1e-4  # torch 2.3 has none
        assert len(found["optimizers"]) == 15
        assert found["optimizers"] == dict.fromkeys(found["optimizers"], 0.0)


def test_so_they_are_in_all_ways_to_train(two: list[Any]) -> None:
    for found in two:
        assert found["modes"].pop("16 bits") < 1e-2  # on a CPU torch rounds the ends of tensors otherwise here, too
        assert found["modes"] == dict.fromkeys(found["modes"], 0.0)


def test_at_4_ranks_single_precision_is_as_near_to_torchs_ddp_as_that_is_to_itself_with_other_buckets(
    four: list[Any],
) -> None:
    for found in (rank["in_single"] for rank in four):
        assert len(found) == 7
        for name in ("SGD", "momentum", "Nesterov"):
            assert found.pop(name)["ours"] < 1e-6, name
        for name, error in found.items():
            assert error["ours"] < 5 * error["torch's"] < 5e-4, name


def test_at_4_ranks_sums_have_another_order_which_in_double_precision_is_next_to_nothing(
    four: list[Any],
) -> None:
    for found in (rank["in_double"] for rank in four):
        assert len(found) > 30
        assert {name: error for name, error in found.items() if error > 1e-12} == {}


def test_parameters_are_finished_whoever_reads_them_and_a_change_of_plan_moves_nothing(two: list[Any]) -> None:
    for found in two:
        assert found["readers"] == {"mlp": 0.0, "attention": 0.0, "recurrent": 0.0}


def test_late_gathers_change_no_result_and_only_who_holds_parameters_can_read_too_early(two: list[Any]) -> None:
    for found in two:
        assert found["delays"]["differences"] == {"read": 0.0, "only trained": 0.0, "held": 0.0, "recurrent": 0.0}
        assert found["delays"]["too early"] > 20


def test_messages_late_by_another_time_on_each_rank_change_no_result(two: list[Any]) -> None:
    for found in two:
        assert len(found["races"]) == 4
        assert found["races"] == dict.fromkeys(found["races"], 0.0)


def test_a_compiled_model_has_the_graphs_that_it_has_with_torchs_class(two: list[Any]) -> None:
    for found in (rank["compiled"] for rank in two):
        have_graphs = {name for name, one in found.items() if sum(map(len, one["torch's"]))}  # operations
        assert found.keys() - have_graphs <= {"a part"}  # of which torch 2.9 has none, with its own class either
        assert {"module", "method", "one graph"} <= have_graphs
        for name, one in found.items():
            assert one["ours"] == one["torch's"], name
            assert one["differences"] == 0.0, name


def test_scripted_and_traced_models_and_cuda_graphs_wait_for_all_parameters_outside_of_ddp_too(two: list[Any]) -> None:
    for found in (rank["scripted"] for rank in two):
        assert found.keys() == {"scripted", "traced", "a part", "a CUDA graph"}
        assert max(found.values()) < 1e-6  # what it fuses may round otherwise the next time


def test_a_thread_that_read_parameters_takes_nothing_off_that_later_gathers_need(two: list[Any]) -> None:
    for found in two:
        assert found["interrupted"] == {"held up": True, "right": True}


def test_who_waits_for_several_gathers_takes_them_in_the_order_in_which_they_travel(two: list[Any]) -> None:
    for found in two:
        assert found["ordered"] == {"listed": [0, 1, 2, 3], "all": [0, 1, 2, 3]}


def test_a_module_that_is_given_the_parameter_of_another_later_waits_for_it_too(two: list[Any]) -> None:
    for found in two:
        assert found["aliased"] == {"tie": 0.0, "tie_a_new_one": 0.0, "put_back": 0.0}


def test_a_module_that_keeps_the_parameters_of_others_is_named_since_less_hides_behind_it(two: list[Any]) -> None:
    said = two[0]["warned"]
    assert ["Listing for 4 parameters" in one for one in said["Listing"]] == [True]
    assert ["Recurrent for 1 parameter" in one for one in said["Recurrent"]] == [True]  # of its LSTM's list nothing
    assert said["Plain"] == []
    assert two[1]["warned"] == {"Listing": [], "Recurrent": [], "Plain": []}


def test_the_tuner_changes_buckets_and_no_state_moves(two: list[Any]) -> None:
    for found in (rank["tuned"] for rank in two):
        assert found["tuning"][0] == "settled", found["tuning"]
        assert found["tried"] > 1
        assert found["difference"] == 0.0
        assert found["gathering"]["all_reduced_s"] > 0
        assert found["planned"]
        assert None not in found["forward"]
        assert "with plain all-reduces a step took" in found["words"]
        assert found["same"]
        assert found["state"] == pytest.approx(2 / 2, rel=0.05)  # two averages, half of each


def test_a_plan_says_how_gradients_and_parameters_travel_each_in_groups_of_their_own(two: list[Any]) -> None:
    for found in (rank["planned"] for rank in two):
        assert found["difference"] == 0.0
        assert (found["gathers"], found["groups"], found["tuning"]) == (True, True, "a plan was set by hand")
        assert "parameters are gathered in other groups on rank 0 than on rank 1" in found["differ"]
        assert found["whole"]
        assert all("all-reduces one of them and shards the other" in found[name] for name in ("mixed", "torch's"))
        assert "without a ShardedOptimizer that has it as plan=" in found["alone"]


def test_one_rank_takes_a_plan_with_gathers_and_gathers_nothing(tmp_path: Path) -> None:
    (found,) = run_ranks(RANKS, ["alone"], tmp_path, 1)
    assert found["alone"] == {"groups": True, "gathers": [], "difference": 0.0}


def test_the_models_plan_says_what_is_gathered_and_makes_such_an_optimizer_again(two: list[Any]) -> None:
    for found in (dict(rank["plans_in_force"]) for rank in two):
        assert "the plan sends messages in bfloat16" in found.pop("wire")
        assert found.pop("then") == ""  # nothing is left of an optimizer that could not be made
        assert found == dict.fromkeys(found, True)


def test_buckets_change_under_gradients_that_would_be_views_of_them(two: list[Any]) -> None:
    for found in (dict(rank["viewed"]) for rank in two):
        assert found.pop("state")[0] == "settled"
        assert found == {"replanned": 0.0, "unused": 0.0, "static graph": 0.0, "tuned": 0.0}


def test_what_is_noted_of_a_forward_pass_is_within_it_whoever_read_parameters_before(two: list[Any]) -> None:
    for found in (rank["noted"] for rank in two):
        assert found["gathers"] == [found["of"]] * 3
        assert found["beyond"] < 1e-9


def test_what_a_forward_pass_waits_for_gathers_is_communication_and_none_of_the_trace(two: list[Any]) -> None:
    for found in (rank["observed"] for rank in two):
        assert (found["steps"], found["gathers"]) == (4, [True] * 4)
        assert found["apart"] < 1e-9
        assert found["waited"] > 0.01  # gathers are late by 10 ms each
        assert found["exposed"] >= -1e-9
        assert found["forward"] < 0.9
        assert found["layers"] == pytest.approx(1.0)
        assert found["predicted"][0] > 1
        assert found["predicted"][1]
        assert "cannot explain: a sharded optimizer gathers parameters" in found["explained"]


def test_the_reducer_copies_no_gradient_that_nobody_reads(two: list[Any]) -> None:
    for found in (rank["copied"] for rank in two):
        assert found == {"all": 0.0, "half": 1.0, "unused": 1.0}


def test_the_state_is_the_plain_optimizers_and_either_goes_on_with_the_others(two: list[Any]) -> None:
    for found in (rank["states"][share] for rank in two for share in ("all", "half")):
        assert found == {"groups": True, "wrong": [], "plain with ours": 0.0, "ours with plain": 0.0}


def test_a_state_dict_has_what_a_scheduler_has_just_set(two: list[Any]) -> None:
    for found in (rank["scheduled"] for rank in two):
        assert found == {"groups": True, "resumed": 0.0}


def test_a_state_that_is_cleared_or_changed_is_so_as_with_torchs_optimizer(two: list[Any]) -> None:
    for found in (rank["edited"] for rank in two):
        assert (found["difference"], found["repr"], found["got"]) == (0.0, True, ["none", False])
        assert "give a whole one to load_state_dict()" in found["set"]


def test_a_state_of_other_groups_is_refused_in_torchs_words_and_changes_nothing(two: list[Any]) -> None:
    for found in (rank["misfit"] for rank in two):
        assert found["ours"] == found["torch's"]
        assert "different number of parameter groups" in found["ours"][0]
        assert "doesn't match the size of optimizer's group" in found["ours"][1]
        assert found["unchanged"]


def test_a_state_of_another_shape_is_refused_and_never_taken_for_one_that_is_the_same_in_all_rows(
    two: list[Any],
) -> None:
    shapes = {"one row": "[1, 12]", "one number": "[]", "turned": "[12, 3]"}
    for found in (rank["misfit"] for rank in two):
        for name, shape in shapes.items():
            assert (
                f"the state of head.weight is of shape {shape}, and the parameter of [3, 12]" in found["shapes"][name]
            )


def test_torchs_own_functions_for_checkpoints_see_the_plain_optimizers_state(two: list[Any]) -> None:
    for found in (rank["by_torchs_functions"] for rank in two):
        for name, one in found.items():
            assert one == {"before": True, "after": True, "loaded": 0.0}, name


def test_hooks_of_state_dicts_and_steps_are_called_as_torch_calls_them(two: list[Any]) -> None:
    for found in (rank["hooked"] for rank in two):
        assert found["ours"] == found["torch's"]
        assert len(found["ours"]) == 9


def test_parameters_may_come_with_names(two: list[Any]) -> None:
    for found in (rank["named"] for rank in two):
        assert found in ({"groups": True}, {})


def test_checkpoints_hold_each_ranks_rows_and_a_new_optimizer_goes_on_from_them(two: list[Any]) -> None:
    if not two[0]["checkpointed"]:
        pytest.skip("this torch has no public DTensor, which checkpoints of rows need")
    for found in (rank["checkpointed"] for rank in two):
        for name, one in found.items():
            assert (one["wrong"], one["unchanged"]) == ([], True), name
    numbers = {name: [rank["checkpointed"][name]["rows"] for rank in two] for name in ("momentum", "AdamW")}
    assert sum(numbers["AdamW"]) == 2 * sum(numbers["momentum"])  # each number of each parameter once on some rank
    assert max(numbers["AdamW"]) < 0.6 * sum(numbers["AdamW"])


def test_rows_are_loaded_by_the_layout_they_were_cut_by_and_what_a_file_lacks_has_no_state(two: list[Any]) -> None:
    if not two[0]["load_otherwise"]:
        pytest.skip("this torch has no public DTensor, which checkpoints of rows need")
    for found in (dict(rank["load_otherwise"]) for rank in two):
        assert "the state of head.weight is of shape [6, 3], and the parameter of [3, 6]" in found.pop("another shape")
        assert found == dict.fromkeys(found, True)
        assert len(found) == 7


def test_another_number_of_ranks_goes_on_with_a_state(four: list[Any], tmp_path: Path) -> None:
    for found in (rank["resumed"] for rank in four):
        assert (found["wrong"], found["rows"]) == ([], [])
        assert found["entries"] == 4
    saved, fewer = tmp_path / "saved by 4", tmp_path / "read by 2"
    saved.mkdir()
    fewer.mkdir()
    run_ranks(RANKS, ["states", "checkpointed"], saved, 4)
    copy_states(saved, fewer)
    assert (fewer / "state.pt").exists()
    for found in (rank["resumed"] for rank in run_ranks(RANKS, ["resumed"], fewer, 2)):
        assert found == {"wrong": [], "rows": [], "entries": 4}


def test_clipping_is_torchs_but_for_the_order_of_sums(two: list[Any]) -> None:
    for found in (dict(rank["clipped"]) for rank in two):
        wrong = [f"norm_type is {bad}, expected more than 0, or inf" for bad in ("0.0", "-1.0", "nan")]
        assert [one.endswith(bad) for one, bad in zip(found.pop("said"), wrong, strict=True)] == [True] * 3
        assert len(found) == 6
        for name, error in found.items():
            assert max(error.values()) < 1e-6, (name, error)


def test_bad_use_is_one_line_on_all_ranks(two: list[Any]) -> None:
    expected = {
        "not ours": "the model is a DistributedDataParallel, expected mgwfbp.DistributedDataParallel",
        "LBFGS": "rank 0: LBFGS looks at all parameters together",
        "unknown": "rank 0: Mine is not known to update every number by itself",
        "another model's": "rank 1: a parameter of shape [3] is not one that the model averages gradients of",
        "not all": "rank 0: the parameter layers.0.weight is trained by the model and was not given",
        "twice": "rank 0: the parameter layers.0.weight has a sharded optimizer already",
        "wrapped twice": "rank 0: the parameter layers.0.weight has a sharded optimizer already",
        "wire": "rank 0: wire='bfloat16' and a sharded optimizer each say how gradients travel",
        "hook": "rank 0: a communication hook says how gradients travel",
        "skips": "rank 0: messages without a used gradient are skipped (skip_all_reduce_unused_params)",
        "sparse": "rank 0: gradients are sparse",
        "strides": "rank 0: the parameter weight has strides (8, 1), expected one that fills its memory",
        "elsewhere": "rank 0: parameters are on a device of type 'meta', expected cpu or cuda: use a plain optimizer",
        "thawed": "rank 0: a parameter of shape [7, 10] is not one that the model averages gradients of",
        "a set": "rank 0: parameters are given as a set, which has another order on every rank: give a list",
        "no rate": "rank 1: ValueError: Invalid learning rate: -1.0",
        "an odd list": "rank 1: a parameter is 3, expected a tensor",
        "another rate": "lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1: give all ranks the same optimizer",
        "another class": "the optimizer is Adam on rank 0 and AdamW on rank 1",
        "another order": "parameter 0 of group 0 is layers.0.weight on rank 0 and head.bias on rank 1",
        "other groups": "the number of groups is 1 on rank 0 and 10 on rank 1",
    }
    for found in (rank["refused"] for rank in two):
        assert expected.keys() - found.keys() <= {"elsewhere"}
        for name, said in found.items():
            assert said.startswith(f"ShardError: {expected[name]}"), said


def test_a_gradient_that_no_rank_has_whole_is_never_used_as_if_one_had(two: list[Any]) -> None:
    for found in (rank["loud"] for rank in two):
        for name in ("torch's clipping", "a plain optimizer", "reading", "no zero_grad"):
            assert "was averaged and each rank has a row of it" in found[name], name
        assert "a communication hook says how gradients travel" in found["hook"]
        assert "was not averaged by the model's backward pass" in found["not averaged"]
        assert "all backward passes but the last inside model.no_sync()" in found["no zero_grad"]
        assert "the process group cannot be changed" in found["other group"]
        assert "join() cannot be with a sharded optimizer" in found["join"]
        assert "a parameter of shape [1] is not one that the model averages gradients of" in found["add"]
        assert "the model is captured in a CUDA graph" in found["captured"]
        for name, parameter in (("moved", "head.weight"), ("assigned", "layers.0.weight")):
            assert f"the parameter {parameter} is another, or has another dtype, device or strides" in found[name]


def test_a_step_that_one_rank_leaves_out_is_an_error_and_never_takes_gradients_for_parameters(two: list[Any]) -> None:
    for found in (rank["skipped"] for rank in two):
        assert "Timed out" in found["error"] or "Connection closed" in found["error"], found
        assert found["changed"] == 0.0


def test_a_model_may_have_another_optimizer_once_the_first_is_gone(two: list[Any]) -> None:
    for found in (rank["again"] for rank in two):
        assert "has a sharded optimizer already" in found["both"]
        assert (found["shared"], found["after"]) == (True, 0.0)


def test_a_parameter_that_was_frozen_when_the_model_was_wrapped_is_not_trained_on_one_ranks_gradient(
    two: list[Any],
) -> None:
    for found in (rank["thawed"] for rank in two):
        for name in ("clipping", "step"):
            assert found[f"{name} False"] == ""
            assert "was frozen when the model was wrapped and is not any more" in found[f"{name} True"]


def test_after_a_backward_pass_that_raised_at_its_end_training_goes_on_as_with_torchs_class(two: list[Any]) -> None:
    for found in two:
        assert found["raised"] == {"steps": [0.0, True, 1], "forgets": [0.0, True, 1]}


def test_a_graph_may_be_called_static_after_the_optimizer_was_made(two: list[Any]) -> None:
    for found in two:
        assert found["static_later"] == {"difference": 0.0}


def test_forgetting_gradients_waits_for_no_parameter(two: list[Any]) -> None:
    for found in (rank["loud"] for rank in two):
        assert found["travels"] > 0
        assert found["after zero_grad"] == [found["travels"]] * 2
        assert found["without gradients"]


def test_gradients_set_to_none_states_in_between_and_parameters_of_one_number_change_nothing(two: list[Any]) -> None:
    for found in two:
        assert found["odd"] == dict.fromkeys(found["odd"], 0.0)


def test_nothing_stays_of_a_model_and_its_optimizer(two: list[Any]) -> None:
    for found in (rank["ended"] for rank in two):
        assert found["threads"][2] <= found["threads"][1]
        assert found["hooks"] == 0
        assert found["plain dicts"]
        assert not found["is held"]
        assert "cannot be copied or pickled" in found["copied"]


def test_what_a_module_is_given_while_its_parameters_travel_stays_its_own() -> None:
    from mgwfbp.runtime.rows.guards import Guarded

    guarded = Guarded({})
    guarded.own = own = {"weight": 1}
    guarded |= {"bias": 2}
    guarded.update(iter([("scale", 3)]))
    assert own == guarded == {"weight": 1, "bias": 2, "scale": 3}


def test_a_process_that_ends_while_parameters_travel_ends_well(tmp_path: Path) -> None:
    # A thread that waits for a message while Python ends would abort the process.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LAST_STEP, str(tmp_path / "store"), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


LAST_STEP = """
import sys, time, torch, torch.distributed as dist
import mgwfbp.runtime.rows.shards as shards
from mgwfbp import DistributedDataParallel, ShardedOptimizer
stock = shards.all_gather
def late(*arguments):
    time.sleep(0.3)
    stock(*arguments)
shards.all_gather = late
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 4), tune=False)
optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


def test_every_optimizer_of_torch_is_tried_here_or_refused_with_a_reason() -> None:
    from torch import optim

    from mgwfbp.runtime.sharded.refusals import ELEMENTWISE, NOT_ELEMENTWISE
    from tests.runtime.shard_ways import OPTIMIZERS

    classes = {one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, optim.Optimizer)}
    assert {way.optimizer for way in OPTIMIZERS.values()} == set(ELEMENTWISE)
    others = {one.__name__ for one in classes - {optim.Optimizer, *ELEMENTWISE}}
    assert {"LBFGS", "SparseAdam"} <= others <= set(NOT_ELEMENTWISE)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 7), st.booleans())
def test_rows_hold_every_number_once_and_give_it_back(counts: list[int], world: int, is_large: bool) -> None:
    import torch

    from mgwfbp.runtime.rows import rows as module

    tensors = [torch.arange(1.0, count + 1) + 100 * place for place, count in enumerate(counts)]
    with pytest.MonkeyPatch.context() as patch:
        if is_large:  # then what does not fill its rows is copied in Python
            patch.setattr(module, "SMALL", 0)
        rows = module.Rows(counts, world)
    message = rows.pack(tensors, torch.full((world, rows.length), -1.0))
    assert message.shape == (world, rows.length)
    assert sorted(message[message != 0].tolist()) == sorted(number for one in tensors for number in one.tolist())
    found = [torch.empty(count) for count in counts]
    rows.unpacker(found)(message)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    for rank in range(world):
        own = [one[rank * length : (rank + 1) * length] for one, length in zip(tensors, rows.lengths, strict=True)]
        assert torch.equal(torch.cat(rows.padded(own)), message[rank])
        parts = rows.parts(own)(message[rank])
        assert all(torch.equal(a, b) for a, b in zip(parts, own, strict=True))
