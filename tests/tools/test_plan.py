"""`paw plan`: shapes, memory against a simulated update, the fallbacks, and the refusal of what
cannot fit."""

import importlib
import json
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from paw import cli
from paw.config.recipe import load
from paw.errors import UserError
from paw.tools.plan.elementwise import assumed_layers, eager_traffic, saved_traffic
from paw.tools.plan.fit import FALLBACKS, Machine, changed, check_fits, check_machine, fit, get
from paw.tools.plan.plan import HOST_S, TURN_S, Plan, Play
from paw.tools.plan.plan_memory import HEAD_BUFFER
from paw.tools.plan.shapes import SHAPES, Shape, from_config, shape_of

COMMON, MEMORY, SIMULATION, PAGES = (
    importlib.import_module(f"bench.{name}")
    for name in ("common", "trainer.memory", "trainer.memory_simulation", "trainer.plan_pages")
)
CARD = {"gpus": 1, "gpu_gib": 80.0}
NAME = "Qwen/Qwen2.5-14B-Instruct"
SERVERS_ELSEWHERE = {"engine.type": "server", "engine.urls": "http://a:1"}
SERVERS = {"engine__type": "server", "engine__servers": 4}


def low_memory(**change):
    keys = {key.replace("__", "."): value for key, value in change.items()}
    return changed(load("14b-low-memory"), keys)


def test_known_shapes_have_the_published_numbers_of_parameters():
    published = {
        "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
        "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-32B": 32_763_876_352,
        "Qwen2.5-72B": 72_706_203_648, "Qwen3-32B": 32_762_123_264, "Llama-3.1-8B": 8_030_261_248,
        "Llama-3.3-70B": 70_553_706_496, "Qwen3-0.6B": 596_049_920,
        "Qwen3-8B": 8_190_735_360, "Llama-3.2-3B": 3_212_749_824, "Qwen3-30B-A3B": 30_532_122_624,
    }  # fmt: skip
    assert {name: SHAPES[name].parameters for name in published} == published
    shape = SHAPES["Qwen3-30B-A3B"]  # 3.3B active by its model card
    assert shape.layers * shape.active_layer + shape.rest == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama", "Qwen3Moe", "Mixtral"])
def test_a_shape_counts_what_hugging_face_builds(kind):
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    experts = {
        "num_experts": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    if kind in ("Qwen3Moe", "Mixtral"):
        sizes |= experts
    settings = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(settings)
    shape = from_config(settings.to_dict(), origin="here")
    assert shape.parameters == model.num_parameters()
    assert shape.layer == sum(p.numel() for p in model.model.layers[0].parameters())
    for name, sizes in shape.linears.items():
        (weight,) = [
            p
            for key, p in model.model.layers[0].named_parameters()
            if key.endswith(f"{name}.weight")
        ]
        assert tuple(weight.shape) == sizes[::-1]


def test_a_folder_and_a_name_give_the_same_shape(tmp_path):
    shape = SHAPES["Qwen2.5-7B"]
    settings = {"model_type": "qwen2", "vocab_size": shape.vocabulary, "hidden_size": shape.hidden}
    settings |= {"intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers}
    settings |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert shape_of(tmp_path) == shape
    assert shape_of("Qwen/Qwen2.5-7B-Instruct") == shape
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match=r"the plan knows qwen2, .*, mixtral; this is 'gpt2'"):
        shape_of(tmp_path)


def test_the_head_takes_what_the_kernels_say():
    torch_rows, triton_rows = (
        importlib.import_module(f"paw_kernels.{name}") for name in ("_torch", "_triton")
    )
    assert {2: triton_rows.CHUNK_BYTES, 4: 3 * torch_rows.CHUNK_BYTES["cuda"]} == HEAD_BUFFER


def test_the_14b_recipe_stays_within_76_gib_of_a_card_and_110_of_host_memory():
    alone = Plan(low_memory(), shape_of(NAME), **CARD, host_gib=110.0)
    assert alone.peak <= 76.0
    assert alone.host_total <= 110.0
    assert not alone.reasons()
    assert not low_memory().lora.rank
    assert alone.config.policy.kl_coef == 0.01  # the paper's, its reference model in host memory
    eight = Plan(low_memory(), shape_of(NAME), gpus=8, gpu_gib=80.0)
    one_host, two_hosts = (
        Plan(low_memory(), shape_of(NAME), gpus=16, gpu_gib=80.0, hosts=hosts) for hosts in (1, 2)
    )
    assert eight.peak <= 76.0
    assert one_host.phases == two_hosts.phases
    assert two_hosts.host["update"]["processes"] == eight.host["update"]["processes"]
    assert two_hosts.host["update"]["optimizer"] < 0.6 * one_host.host["update"]["optimizer"]
    copies = Plan(low_memory(model__shard="node"), shape_of(NAME), gpus=16, gpu_gib=80.0, hosts=2)
    assert copies.phases == eight.phases
    assert copies.host == eight.host


def test_a_checkpoint_is_copied_where_half_of_the_room_holds_it():
    """Float32 weights and two moments; else eight ranks hold a part of a file, and a share of the
    embedding."""
    shape = shape_of(NAME)
    plain = low_memory(optim__name="adamw", optim__offload=False)
    for host_gib, expected_bytes in (
        (None, 8 * 4 * 2**30 + 2 * shape.embedding),
        (1000.0, 12 * shape.parameters),
    ):
        plan = Plan(plain, shape, gpus=8, gpu_gib=80.0, host_gib=host_gib)
        assert plan.host["save"]["checkpoint"] == pytest.approx(expected_bytes / 2**30)
        # Training waits for the copy, or the disk.
        saved = 12 * shape.parameters / (8 * 25e9 if host_gib else 1.6e9)
        assert plan.seconds["checkpoint"] * plain.run.save_every == pytest.approx(saved)


def test_components_are_those_of_the_settings():
    shape = shape_of(NAME)
    P = SHAPES["Qwen2.5-14B"].parameters / 2**30
    update = Plan(low_memory(), shape, **CARD).phases["update"]
    assert update["weights"] == pytest.approx(2 * P)
    assert update["gradients"] == update["weights"]
    assert "optimizer" not in update
    assert "reference" not in update
    moments = 2 + 2 * 2 / 32  # 8-bit, with a 16-bit scale for every 32
    vectors = shape.vectors / 2**30  # norms and biases: weight and moments in float32
    for bits in (24, 32):
        parts_on_card = Plan(
            low_memory(optim__offload=False, optim__master_bits=bits), shape, **CARD
        ).phases["update"]
        assert parts_on_card["optimizer"] == pytest.approx(
            ((bits - 16) / 8 + moments) * (P - vectors) + 12 * vectors
        )
    plain = low_memory(optim__name="adamw", policy__offload_reference=False)
    parts = Plan(plain, shape, gpus=8, gpu_gib=80.0).phases["step"]
    sharded = {"weights": 4, "reference": 4, "gradients": 4, "optimizer": 8}
    assert {name: parts[name] for name in sharded} == pytest.approx(
        {n: b * P / 8 for n, b in sharded.items()}
    )


def test_a_critic_takes_a_second_model():
    shape = shape_of(NAME)
    eight = {"gpus": 8, "gpu_gib": 80.0, "host_gib": 900.0}
    grpo, ppo = (Plan(low_memory(advantage__type=name), shape, **eight) for name in ("grpo", "ppo"))
    # Bf16, no vocabulary's head.
    critic = 2 * (shape.parameters - shape.embedding + shape.hidden + 1) / 8 / 2**30
    for phase, parts in ppo.phases.items():
        assert parts == pytest.approx(grpo.phases[phase] | {"critic": critic})
    # Its optimizer state lies in host memory beside the policy's: 2 + 2.125 bytes a parameter.
    state = ppo.host["update"]["optimizer"] - grpo.host["update"]["optimizer"]
    vectors = shape.vectors / 2**30
    assert state == pytest.approx(4.125 * (critic / 2 * 8 - vectors) + 12 * vectors)
    assert ppo.seconds["score"] > grpo.seconds["score"]
    assert ppo.seconds["update"] > grpo.seconds["update"]


def test_servers_take_nothing_of_the_trainers_cards():
    cards: dict[str, Any] = {"gpu_gib": 80.0, "host_gib": 900.0}
    beside = Plan(low_memory(engine__type="transformers"), shape_of(NAME), gpus=4, **cards)
    apart = Plan(low_memory(**SERVERS), shape_of(NAME), gpus=8, **cards)
    elsewhere = Plan(
        low_memory(engine__type="server", engine__urls="http://a:1"),
        shape_of(NAME),
        gpus=4,
        **cards,
    )
    for phase, parts in beside.phases.items():
        trainer_parts = {
            name: size for name, size in parts.items() if name not in ("engine", "KV cache")
        }
        assert apart.phases[phase] == pytest.approx(trainer_parts)
        assert elsewhere.phases[phase] == apart.phases[phase]
    assert not apart.reasons()
    assert not elsewhere.reasons()
    assert apart.host == beside.host
    with pytest.raises(UserError, match=r"engine\.servers take 4, none is left"):
        Plan(low_memory(**SERVERS), shape_of(NAME), gpus=4, **cards)


def test_a_server_divides_weights_and_heads_among_its_cards():
    def plan(model, size, share=0.9):
        tree = {
            "model.path": model,
            "engine.type": "server",
            "engine.servers": 1,
            "engine.tensor_parallel": size,
        }
        config = changed(load("alfworld-gigpo-paw"), tree, {"engine.gpu_memory_utilization": share})
        return Plan(config, shape_of(model), gpus=32, gpu_gib=80.0)

    one_card, two_cards, sixteen_cards = (plan(NAME, size) for size in (1, 2, 16))
    weights_gib = 2 * SHAPES["Qwen2.5-14B"].parameters / 2**30
    assert one_card.phases["server"]["engine"] - two_cards.phases["server"][
        "engine"
    ] == pytest.approx(weights_gib / 2)
    cache = two_cards.phases["server"]["KV cache"] * 2**30
    assert two_cards.kv_tokens * SHAPES["Qwen2.5-14B"].kv_bytes == pytest.approx(2 * cache)
    # More cards than heads of keys: each has one, as another has.
    cache = sixteen_cards.phases["server"]["KV cache"] * 2**30
    assert sixteen_cards.kv_tokens * SHAPES["Qwen2.5-14B"].kv_bytes == pytest.approx(8 * cache)
    least = {
        name: plan(name, 8).engine.least_cards
        for name in (NAME, "Qwen/Qwen2.5-32B", "meta-llama/Llama-3.3-70B-Instruct")
    }
    assert list(least.values()) == [1, 1, 2]
    assert plan("Qwen/Qwen2.5-32B", 1, 0.8).engine.least_cards == 2
    small = plan("meta-llama/Llama-3.3-70B-Instruct", 1)
    assert "a server needs engine.tensor_parallel = 2" in small.reasons()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "hosts"),
    [("Qwen/Qwen2.5-32B-Instruct", 16, 2), ("meta-llama/Llama-3.3-70B-Instruct", 32, 4)],
)
def test_servers_make_room_for_large_models_before_anything_else_is_learnt(model, gpus, hosts):
    config = changed(load("alfworld-gigpo-paw"), {"model.path": model})
    machine = Machine(gpus=gpus, gpu_gib=80.0, hosts=hosts)
    tried = fit(config, shape_of(model), machine)
    best = tried[-1][1]
    assert not best.reasons()
    assert best.served
    assert best.N + best.engine.engines * best.engine.cards <= gpus
    assert best.config.lora.rank == 0
    assert best.config.policy.kl_coef == 0.01
    assert best.engine.cards >= best.engine.least_cards > 0
    assert "--engine.type server" in tried[-1][0]
    assert not fit(config, shape_of(model), machine, pinned=["engine.type"])[-1][1].served


def test_rollouts_ahead_overlap_and_the_longest_episode_ends_them():
    config = low_memory(**SERVERS, env__max_turns=50)
    cards = {"gpus": 8, "gpu_gib": 80.0}
    in_turn, ahead = (
        Plan(changed(config, {"rollout.ahead": updates_ahead}), shape_of(NAME), **cards)
        for updates_ahead in (0, 1)
    )
    seconds = in_turn.seconds
    training = sum(seconds.values()) - seconds["rollout"] - seconds["sync"]
    assert in_turn.seconds == ahead.seconds
    assert in_turn.step_s == pytest.approx(sum(seconds.values()))
    assert ahead.step_s == pytest.approx(seconds["sync"] + max(seconds["rollout"], training))
    assert ahead.step_s < in_turn.step_s
    small = changed(
        config, {"model.path": "Qwen/Qwen2.5-0.5B", "rollout.tasks": 1, "rollout.group_size": 2}
    )
    two_episodes = Plan(small, SHAPES["Qwen2.5-0.5B"], **cards)
    response = Play.of(small).response
    # 5 ms a token, all turns.
    assert two_episodes.seconds["rollout"] == pytest.approx(50 * response * 5e-3, rel=0.01)
    four_episodes = Plan(changed(small, {"rollout.group_size": 4}), SHAPES["Qwen2.5-0.5B"], **cards)
    assert four_episodes.seconds["rollout"] == pytest.approx(
        two_episodes.seconds["rollout"], rel=0.01
    )


def test_what_follows_a_rollout():
    shape = shape_of(NAME)
    cards = {"gpus": 8, "gpu_gib": 80.0}

    def seconds(hosts=1, **change):
        return Plan(low_memory(**SERVERS | change), shape, hosts=hosts, **cards).seconds

    base = seconds()
    P = shape.parameters
    assert seconds(engine__transfer="files")["sync"] == pytest.approx(2 * P / 1.6e9)
    lora = {
        "lora__rank": 16,
        "optim__name": "adamw",
        "optim__offload": False,
        "policy__offload_reference": False,
    }
    adapters = seconds(**lora)
    merged = seconds(**lora, lora__send="merged")
    assert adapters["sync"] < base["sync"] / 40
    assert adapters["checkpoint"] < base["checkpoint"] / 20
    assert merged["sync"] == pytest.approx(base["sync"])
    engines = [
        low_memory(**lora, engine__type="vllm", engine__sleep_level=level) for level in (1, 2)
    ]
    beside = [Plan(config, shape, **cards).seconds["sync"] for config in engines]
    # A vLLM that drops the base weights gets them.
    assert beside[0] < 0.1
    assert beside[1] > 0.1
    assert beside[1] == pytest.approx(2 * P / 25e9)
    assert seconds(run__save_every=50)["checkpoint"] == pytest.approx(base["checkpoint"] / 2)
    assert seconds(run__save_every=0)["checkpoint"] == 0
    # The reference's is left.
    assert seconds(policy__old_logp="engine")["score"] == pytest.approx(base["score"] / 2)
    modes = [seconds(model__checkpointing=mode)["update"] for mode in ("none", "selective", "full")]
    assert 0.74 < modes[0] / modes[2] < 0.77
    assert modes[1] == pytest.approx((modes[0] + modes[2]) / 2)
    assert seconds(optim__minibatch_samples=128)["step"] == pytest.approx(2 * base["step"], rel=0.1)


def test_eager_layers_take_the_time_of_the_traffic_that_fused_ones_save():
    shape = shape_of(NAME)

    def plan(**change):
        return Plan(low_memory(**SERVERS | change), shape, gpus=8, gpu_gib=80.0)

    fused = plan()
    eager = plan(model__compile=False)
    assert fused.layers == "compiled"
    assert fused.config.model.checkpointing == "full"
    saved = saved_traffic(shape)
    play = eager.play
    tokens = play.episodes * play.turns / eager.N * (play.length + play.observation)
    moved = tokens * shape.layers * (2 * saved.forward + saved.backward)
    difference = eager.seconds["update"] - fused.seconds["update"]
    assert difference == pytest.approx(moved / (0.73 * 3.35e12))
    assert eager.seconds["score"] > fused.seconds["score"]
    for name in ("rollout", "step", "sync", "host"):
        assert eager.seconds[name] == fused.seconds[name]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "compiled"),
        ({"compile": False}, "eager"),
        ({"compile": False, "liger": True}, "Liger's kernels"),
        ({"compile": True, "checkpointing": "selective"}, "compiled"),
        ({"checkpointing": "selective"}, "Liger's kernels"),
        ({"checkpointing": "selective", "liger": False}, "eager"),
    ],
)
def test_the_plan_assumes_the_layers_that_a_run_tries_first(changes, layers):
    config = low_memory(**{f"model__{key}": value for key, value in changes.items()})
    assert assumed_layers(config.model) == layers


def test_the_traffic_of_eager_layers_is_what_was_counted():
    counted = importlib.import_module("bench.trainer.elementwise")
    for name in ("Qwen2.5-1.5B", "Qwen3-0.6B", "Llama-3.2-3B"):
        traffic = counted.counted_traffic(SHAPES[name])
        planned = eager_traffic(SHAPES[name])
        assert planned.forward == pytest.approx(traffic.forward, rel=0.015)
        assert planned.backward == pytest.approx(traffic.backward, rel=0.015)


def test_gathers_over_the_network_take_longer_than_small_micro_batches():
    shape = shape_of(NAME)
    cards = {"gpus": 8, "gpu_gib": 80.0}
    small = low_memory(optim__micro_batch_tokens=1024)
    one_host, two_hosts = (Plan(small, shape, hosts=hosts, **cards) for hosts in (1, 2))
    copies = Plan(changed(small, {"model.shard": "node"}), shape, hosts=2, **cards)
    assert two_hosts.seconds["update"] > 1.5 * one_host.seconds["update"]
    assert one_host.seconds["update"] < copies.seconds["update"] < two_hosts.seconds["update"]


@pytest.mark.parametrize(
    "run",
    [run for run in PAGES.RUNS if run.held],
    ids=lambda run: f"{run.model}-{run.length}",
)
def test_training_takes_as_long_as_in_published_runs(run):
    """torchtitan and prime-rl on H100s, within a quarter; bench/trainer/plan_pages.py has the
    sources."""
    assert run.predicted == pytest.approx(run.published, rel=0.25)


def test_the_hosts_time_is_as_measured():
    encoding = COMMON.read(COMMON.RESULTS / "host_cpu.csv")
    rest = COMMON.read(COMMON.RESULTS / "host_part_cpu.csv")
    measured = median(float(row["encode_us"]) for row in encoding)
    measured += median(float(row["us_a_token"]) for row in rest)
    assert pytest.approx(1e-6 * measured, rel=0.05) == HOST_S

    simulated = COMMON.read(COMMON.RESULTS / "exchange_simulated.csv")[-1]
    assert simulated["simulated_ranks"] == "512"
    turn_s = float(simulated["sum_s"]) / float(simulated["turns"])
    assert pytest.approx(turn_s, rel=0.05) == TURN_S


@pytest.mark.slow
def test_pages_have_what_the_plan_says():
    for page, remade in ((PAGES.MEMORY, PAGES.memory_page), (PAGES.SCALE, PAGES.scale_page)):
        text = page.read_text(encoding="utf-8")
        assert remade(text) == text, f"python bench/trainer/plan_pages.py remakes {page}"


def test_every_saving_saves():
    shape = shape_of(NAME)
    peaks = [
        sum(Plan(low_memory(**change), shape, **CARD).phases["update"].values())
        for change in (
            {"model__checkpointing": "none", "optim__offload": False},
            {"model__checkpointing": "none"},
            {"model__checkpointing": "selective"},
            {},
            {"optim__micro_batch_tokens": 8192},
            {"optim__micro_batch_tokens": 8192, "model__offload_activations": True},
            {"lora__rank": 16, "optim__name": "adamw"},
        )
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    config = low_memory(model__path="Qwen/Qwen3-30B-A3B")
    experts = SHAPES["Qwen3-30B-A3B"]
    routed, dense = (
        Plan(config, shape_of_model, gpus=8, gpu_gib=80.0)
        for shape_of_model in (
            experts,
            replace(experts, experts=0, active=1, intermediate=128 * 768),
        )
    )  # whole in memory, in part in time
    assert routed.phases["rollout"]["weights"] == pytest.approx(
        dense.phases["rollout"]["weights"], rel=0.01
    )
    assert routed.seconds["update"] < dense.seconds["update"] / 4


@pytest.mark.slow
def test_the_fallbacks_find_full_parameter_training_of_14b_on_one_card(tmp_path, capsys):
    out = tmp_path / "found.toml"
    words = [
        "plan",
        "--model",
        NAME,
        "--gpus",
        "1x80GB",
        "--host-gib",
        "110",
        "--json",
        "--out",
        str(out),
    ]
    assert cli.main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["peak_gib"] <= 76
    assert plan["host_gib"] <= 110
    assert plan["reasons"] == []
    assert plan["settings"]["lora.rank"] == 0
    assert plan["settings"]["optim.name"] == "flash-adamw"
    assert {"weights", "gradients", "activations", "head", "engine"} <= plan["components"][
        "update"
    ].keys()
    assert "KV cache" in plan["components"]["rollout"]
    assert plan["step_s"] > 0
    config = load(out)
    assert config.model.path == NAME
    # Fewer than there are episodes: the cache is small.
    assert 8 < config.engine.max_num_seqs == plan["settings"]["engine.max_num_seqs"] < 128
    share = {"engine.gpu_memory_utilization": config.engine.gpu_memory_utilization}
    assert {key: get(config, key) for key in plan["settings"]} | share == plan["settings"]


@pytest.mark.parametrize(
    ("changes", "gpus", "sequences"),
    [
        ({}, 1, 128),  # 16 tasks of 8 episodes
        ({}, 4, 32),  # an engine in each rank
        ({"rollout.tasks": 2, "eval.games": 5}, 1, 16),
        ({"rollout.tasks": 2, "eval.games": 50}, 1, 50),
        ({"rollout.tasks": 1000}, 1, 1024),
        ({"engine.type": "server", "engine.servers": 2, "rollout.ahead": 1}, 4, 128),
    ],
)
def test_as_many_sequences_at_a_time_as_there_are_episodes(changes, gpus, sequences):
    config = changed(load("alfworld-grpo-paw"), changes)
    shape = shape_of(config.model.path)
    plan = fit(config, shape, Machine(gpus=gpus, gpu_gib=80.0))[-1][1]
    assert plan.config.engine.max_num_seqs == plan.engine.sequences == sequences


def test_no_more_sequences_at_a_time_than_the_cache_holds():
    """With a cache for half of them, an update takes longer; a pinned number stays."""
    config = changed(load("alfworld-grpo-paw"), {"rollout.tasks": 1000})
    shape = shape_of(config.model.path)
    machine = Machine(**CARD)
    long = changed(
        config, {"rollout.max_prompt_tokens": 16384, "rollout.max_response_tokens": 4096}
    )
    plan = fit(long, shape, machine)[-1][1]
    sequences = plan.config.engine.max_num_seqs
    assert 1 < sequences < 1024
    assert sequences * plan.play.length <= plan.kv_tokens < (sequences + 1) * plan.play.length
    assert not plan.reasons()

    few = changed(config, {"engine.max_num_seqs": 7})
    pinned = fit(few, shape, machine, pinned=["engine.max_num_seqs"])[-1][1]
    chosen = fit(few, shape, machine)[-1][1]
    assert pinned.config.engine.max_num_seqs == 7
    assert chosen.config.engine.max_num_seqs == 1024
    assert pinned.seconds["rollout"] > chosen.seconds["rollout"]


def test_engines_without_such_a_number_are_planned_without_it():
    for engine in ({"engine.type": "transformers"}, SERVERS_ELSEWHERE):
        config = changed(load("alfworld-grpo-paw"), engine)
        plan = fit(config, shape_of(config.model.path), Machine(**CARD))[-1][1]
        assert "max_num_seqs" not in str(plan.config.model_dump(exclude_unset=True))


def test_what_fits_is_left_alone_and_keys_on_the_command_line_stay(capsys):
    config = load("alfworld-gigpo-paw")
    assert [label for label, _ in fit(config, shape_of(config.model.path), Machine(**CARD))] == [
        "as configured"
    ]
    assert cli.main(["plan", "alfworld-gigpo-paw", "--gpus", "1x80GB"]) == 0
    output = capsys.readouterr().out
    assert "as configured" in output
    assert "KV cache" in output
    assert "128 responses at a time in each engine (engine.max_num_seqs)" in output
    assert "a prediction" in output
    assert all(f"{basis}: " in output for basis in ("published", "measured", "assumed"))
    words = [
        "plan",
        "--model",
        NAME,
        "--gpus",
        "1x24GB",
        "--json",
        "--optim.name",
        "adamw",
        "--lora.rank",
        "0",
    ]
    assert cli.main(words) == 1  # no such thing fits
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert plan["reasons"]
    assert not plan["settings"]["optim.offload"]
    assert plan["settings"]["optim.name"] == "adamw"
    assert plan["settings"]["lora.rank"] == 0


def test_more_cards_than_a_mini_batch_has_turns_are_named(capsys):
    words = ["plan", "alfworld-grpo-paw-7b", "--gpus", "64x80GB", "--hosts", "8"]
    for turns, said in ((64, False), (63, True)):
        cli.main([*words, "--optim.minibatch_samples", str(turns)])
        output = " ".join(capsys.readouterr().out.split())
        line = "64 cards train on 63 turns a step, so 1 have nothing to do"
        assert (line in output) == said


def test_the_number_of_cards_from_which_the_hosts_time_hardly_falls_is_named(capsys):
    for cards, said in ((64, False), (512, True)):
        words = ["--gpus", f"{cards}x80GB", "--hosts", str(cards // 8)]
        cli.main(["plan", "alfworld-grpo-paw-7b", *words, "--optim.minibatch_samples", "512"])
        assert ("for the numbers of all turns" in capsys.readouterr().out) == said


def planned(capsys, *words, code=0):
    """What `paw plan ... --json` prints for Qwen3-4B on a card of 24 GB."""
    assert (
        cli.main(["plan", "--model", "Qwen/Qwen3-4B", "--gpus", "1x24GB", "--json", *words]) == code
    )
    return json.loads(capsys.readouterr().out)


def test_a_share_of_the_card_between_the_steps_is_found(capsys):
    """With adapters 0.50 of it holds too few sequences, and 0.55 leaves the trainer too little
    room."""
    for share in ("0.50", "0.55"):
        planned(capsys, "--lora.rank", "32", "--engine.gpu_memory_utilization", share, code=1)
    plan = planned(capsys, "--lora.rank", "32")
    assert plan["fits"]
    assert 0.50 < plan["settings"]["engine.gpu_memory_utilization"] < 0.55
    # Nothing else about the learning was changed.
    assert plan["settings"]["policy.kl_coef"] == 0.01


@pytest.mark.slow
def test_adapters_are_tried_or_offered_before_the_plan_says_no(capsys):
    tried = planned(capsys, "--optim.name", "adamw")  # which is what adapters are trained with
    assert tried["fits"]
    assert tried["settings"]["lora.rank"] == 32
    assert tried["settings"]["policy.kl_coef"] == 0.01
    # What the fallbacks before offload does not fit there.
    small_host = planned(capsys, "--host-gib", "16")
    assert small_host["fits"]
    assert small_host["settings"]["lora.rank"] == 32

    pinned = [
        "--optim.name",
        "flash-adamw",
        "--optim.offload",
        "false",
    ]  # no adapters with that optimizer
    refused = planned(capsys, *pinned, code=1)
    assert not refused["fits"]
    assert "--lora.rank 32" in refused["adapters"]
    offered = refused["adapters"].split()
    assert planned(capsys, *offered)["fits"]
    assert cli.main(["plan", "--model", "Qwen/Qwen3-4B", "--gpus", "1x24GB", *pinned]) == 1
    assert f"with adapters it would fit: {refused['adapters']}" in capsys.readouterr().out
    assert planned(capsys, *pinned, "--lora.rank", "0", code=1)["adapters"] == ""  # not wanted


def test_the_plan_names_the_workload_that_it_assumes(capsys):
    words = ["--gpus", "1x80GB", "--rollout.tasks", "4", "--rollout.max_prompt_tokens", "4096"]
    for subject, origin in (
        (["quickstart", "--model", NAME], "quickstart"),
        (["--model", NAME], "alfworld-gigpo-paw"),
    ):
        cli.main(["plan", *subject, *words])
        (line,) = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("workload of ")
        ]
        assert f"workload of {origin}" in line
        assert ("another: paw plan RECIPE" in line) == (subject[0] == "--model")
        assert "4 tasks x " in line
        assert "prompts of 4,096 tokens at most" in line
        assert "KV cache of 8 sequences" in line


def test_a_refusal_names_numbers_and_settings_that_pass():
    machine = Machine(**CARD, host_gib=110.0)
    config = changed(load("alfworld-gigpo-paw"), {"model.path": NAME})
    shape = shape_of(NAME)
    with pytest.raises(
        UserError, match=r"needs \d+\.\d GiB of a GPU, 80\.0 are usable \(weights 55\.0"
    ) as refusal:
        check_fits(config, shape, machine)
    assert "\n" not in str(refusal.value)
    words = str(refusal.value).partition("what fits: ")[2].partition(" (see")[0].split()
    advised = dict(zip([word.removeprefix("--") for word in words[::2]], words[1::2], strict=True))
    check_fits(load("alfworld-gigpo-paw", {"model.path": NAME} | advised), shape, machine)
    assert advised.keys() <= {key for change in FALLBACKS for key in change} | {
        "engine.gpu_memory_utilization",
        "engine.max_num_seqs",
    }


def test_a_refusal_names_servers_where_a_run_can_start_them():
    config = changed(load("alfworld-gigpo-paw"), {"model.path": "Qwen/Qwen2.5-32B"})
    for hosts, started in ((1, True), (2, False)):
        with pytest.raises(UserError, match="does not fit") as refusal:
            machine = Machine(gpus=16, gpu_gib=80.0, hosts=hosts)
            check_fits(config, SHAPES["Qwen2.5-32B"], machine)
        assert ("--engine.type server" in str(refusal.value)) == started


def test_training_refuses_what_cannot_fit_before_it_loads_anything(tmp_path, capsys, monkeypatch):
    huge = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 1 << 17)
    settings = huge | {"model_type": "llama", "num_hidden_layers": 200, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings))  # and neither tokenizer nor weights
    words = [
        "--model.path",
        str(tmp_path),
        "--model.device",
        "cpu",
        "--run.dir",
        str(tmp_path / "runs"),
    ]
    assert cli.main(["train", "quickstart", *words]) == 2
    assert "does not fit: weights, gradients and optimizer take" in capsys.readouterr().err

    config = changed(
        load("quickstart"), {"model.path": "Qwen/Qwen2.5-1.5B", "model.shard": "world"}
    )
    need = Plan(config, shape_of(config.model.path), **CARD).phases["update"]
    pages = 0.75 * sum(need[part] for part in ("weights", "gradients", "optimizer")) * 2**30
    monkeypatch.setattr("os.sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else 1)
    check_machine(config, gpus=2, gpu_gib=None, on_host=1)  # half of it here, half elsewhere
    with pytest.raises(UserError, match="does not fit"):
        check_machine(config, gpus=2, gpu_gib=None, on_host=2)
    with pytest.raises(UserError, match="does not fit"):
        check_machine(changed(config, {"model.shard": "none"}), gpus=2, gpu_gib=None, on_host=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_the_tracker_counts_what_the_allocator_does(dtype):
    tree = {
        "model": {"path": "-", "dtype": dtype, "checkpointing": "full"},
        "optim": {"micro_batch_tokens": 512},
    }
    config = MEMORY.validate(tree, origin="test")
    small = Shape(512, 256, 512, 2, 4, 2, 64, tied=False, qkv_bias=True)
    peaks = SIMULATION.simulate(config, small, attention="sdpa")
    assert peaks.update > peaks.step  # so that activations count
    assert peaks.update == pytest.approx(SIMULATION.real_peak(config, small), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layers"),
    [
        (("Qwen2.5-1.5B", 1, "flash-adamw", "full"), 8),
        (("Qwen2.5-1.5B", 8, "adamw", "full"), 2),
    ],
)
def test_the_plan_agrees_with_the_simulation(case, layers):
    config = MEMORY.make_config(*case, 8192)
    shape = replace(SHAPES[case[0]], layers=layers)
    predicted = MEMORY.predicted(config, shape, case[1])
    simulated = SIMULATION.simulate(config, shape, case[1])
    assert predicted["update"] == pytest.approx(simulated.update, rel=0.05)
    assert predicted["step"] == pytest.approx(simulated.step, rel=0.05)


def test_mistakes_are_one_line(capsys):
    for words, message in (
        (["--gpus", "1x80GB"], "give a recipe or --model"),
        (["--model", NAME, "--gpus", "80"], "--gpus '80': write it like 1x80GB"),
        (["--model", NAME, "--gpus", "2x80GB", "--hosts", "3"], "--hosts 3: from 1 to the 2 cards"),
    ):
        assert cli.main(["plan", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
