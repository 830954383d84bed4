import copy
import gc
import operator
import re
import weakref

import pytest
import torch
from accelerate import cpu_offload
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    DDPMPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    XFormersAttnProcessor,
)
from helpers import tiny_sdxl
from peft import LoraConfig

from debias_diffusion.pipelines.keys_values import keep_keys_values
from debias_diffusion.pipelines.stable_diffusion_xl import StableDiffusionXLLongPromptPipeline

STEPS = 3
LONG = "a red square on the left of a blue circle, " * 10

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]


@pytest.fixture(scope="module")
def sdxl_parts():
    return tiny_sdxl.sdxl_parts() | {"image_encoder": None, "feature_extractor": None}


@pytest.fixture(scope="module")
def sd_parts():
    return tiny_sdxl.sd15_parts()


def build(cls, parts, **settings):
    """A pipeline with a UNet of its own, which a test may change."""
    pipe = cls(**{**parts, "unet": copy.deepcopy(parts["unet"])}, **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def sdxl(sdxl_parts):
    return build(StableDiffusionXLLongPromptPipeline, sdxl_parts, add_watermarker=False)


@pytest.fixture
def stock_sdxl(sdxl_parts):
    return build(StableDiffusionXLPipeline, sdxl_parts, add_watermarker=False)


@pytest.fixture
def sd(sd_parts):
    return build(StableDiffusionPipeline, sd_parts, requires_safety_checker=False)


@pytest.fixture(params=["sdxl", "stock_sdxl", "sd"])
def any_pipe(request):
    return request.getfixturevalue(request.param)


def draw(pipe, prompt="a cat", change=None, **settings):
    """[pictures, latents of every step]; `change(step, tensors)` is a callback that may replace prompt embeddings."""
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append(tensors["latents"].clone())
        return (change and change(pipe, step, tensors)) or {}

    pictures = pipe(
        prompt,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
        output_type="pt",
        **settings,
    ).images
    return [pictures, *seen]


def same(one, other) -> bool:
    assert all(torch.isfinite(tensor).all() for tensor in one)
    return len(one) == len(other) and all(map(torch.equal, one, other))


def cross_layers(model) -> list[Attention]:
    layers = [module for module in model.modules() if isinstance(module, Attention) and module.is_cross_attention]
    assert layers
    return layers


def processors(pipe) -> list:
    return list(pipe.unet.attn_processors.values())


@pytest.fixture
def count():
    """Counts the calls of `to_k` and `to_v` of a model's cross-attention: a call a layer is 1."""
    handles = []

    def watch(model):
        calls = []
        projections = [projection for layer in cross_layers(model) for projection in (layer.to_k, layer.to_v)]
        handles.extend(projection.register_forward_hook(lambda *_: calls.append(1)) for projection in projections)

        def calls_since_last_time() -> float:
            number = len(calls)
            calls.clear()
            return number / len(projections)

        return calls_since_last_time

    yield watch
    for handle in handles:
        handle.remove()


# --- the same pictures, with fewer calls ---


@pytest.mark.parametrize("processor", [AttnProcessor, AttnProcessor2_0])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_every_step_is_the_plain_run_s_and_keys_are_made_once(any_pipe, processor, guidance, count):
    any_pipe.unet.set_attn_processor(processor())
    calls = count(any_pipe.unet)
    plain = draw(any_pipe, guidance_scale=guidance)
    assert calls() == STEPS
    with keep_keys_values(any_pipe):
        kept = draw(any_pipe, guidance_scale=guidance)
    assert calls() == 1
    assert same(plain, kept)
    assert len(plain) == 1 + STEPS and not torch.equal(plain[1], plain[2])


def test_diffusers_default_processor_is_one_of_the_two(any_pipe):
    assert {type(processor) for processor in processors(any_pipe)} <= {AttnProcessor, AttnProcessor2_0}


def test_prompts_lengths_and_batches_follow_each_other_in_one_context(sdxl, count):
    calls = count(sdxl.unet)
    cases = [("a cat", {}), ("a dog", {}), (LONG, {}), (["a cat", LONG], {}), ("a cat", {"num_images_per_prompt": 2})]
    cases += [("a cat", {"guidance_scale": 1.0}), ("a cat", {})]
    plain = [draw(sdxl, prompt, **settings) for prompt, settings in cases]
    assert not same(plain[0], plain[1])
    calls()
    with keep_keys_values(sdxl):
        for (prompt, settings), expected in zip(cases, plain, strict=True):
            assert same(draw(sdxl, prompt, **settings), expected), prompt
            assert calls() == 1


def test_embeddings_passed_in_and_changed_between_calls(stock_sdxl):
    with torch.no_grad():
        embeds, _, pooled, _ = stock_sdxl.encode_prompt("a cat", do_classifier_free_guidance=False)
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "guidance_scale": 1.0}
    first = draw(stock_sdxl, None, **given)
    with keep_keys_values(stock_sdxl):
        assert same(draw(stock_sdxl, None, **given), first)
        embeds.mul_(0.5)
        changed = draw(stock_sdxl, None, **given)
    assert same(draw(stock_sdxl, None, **given), changed) and not same(first, changed)


@pytest.mark.parametrize("models", [1, 2])
def test_controlnets_keep_theirs_too(stock_sdxl, models, count):
    torch.manual_seed(0)
    nets = [ControlNetModel.from_unet(stock_sdxl.unet).eval() for _ in range(models)]
    for net in nets:  # they begin as zero convolutions, which would hide what they compute
        for parameter in [*net.controlnet_down_blocks.parameters(), *net.controlnet_mid_block.parameters()]:
            torch.nn.init.normal_(parameter, std=0.05)
    parts = {**stock_sdxl.components, "controlnet": nets if models > 1 else nets[0]}
    pipe = build(StableDiffusionXLControlNetPipeline, parts, add_watermarker=False)
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    settings = {"image": [image] * models if models > 1 else image}
    scales = {"controlnet_conditioning_scale": [1.0] * models if models > 1 else 1.0}
    counters = [count(net) for net in nets]
    plain = draw(pipe, **settings, **scales)
    assert [calls() for calls in counters] == [STEPS] * models
    with keep_keys_values(pipe):
        kept = draw(pipe, **settings, **scales)
        assert [calls() for calls in counters] == [1] * models
        guessed = draw(pipe, guess_mode=True, **settings, **scales)
    assert same(plain, kept)
    assert same(guessed, draw(pipe, guess_mode=True, **settings, **scales))
    assert not same(plain, draw(pipe, **settings, controlnet_conditioning_scale=[0.0] * models if models > 1 else 0.0))
    assert {type(layer.processor) for net in nets for layer in cross_layers(net)} == {AttnProcessor2_0}


def test_keys_are_normalised_as_in_the_plain_run():
    torch.manual_seed(0)
    layer = Attention(16, 24, heads=2, dim_head=8, qk_norm="layer_norm", cross_attention_norm="layer_norm").eval()
    unet = UNet2DConditionModel.__new__(UNet2DConditionModel)
    torch.nn.Module.__init__(unet)
    unet.layer = layer
    pipe = DDPMPipeline.__new__(DDPMPipeline)
    pipe.unet = unet
    hidden, embeds = torch.randn(3, 5, 16), torch.randn(3, 7, 24)
    with torch.no_grad():
        plain = layer(hidden, embeds)
        with keep_keys_values(pipe):
            assert torch.equal(layer(hidden, embeds), plain) and torch.equal(layer(hidden, embeds), plain)
            # without embeddings it is self-attention, whose keys change; only widths that fit can do that
            square = torch.randn(3, 7, 16)
            layer.to_k, layer.to_v = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            layer.norm_cross = None
            selves = [layer(square), layer(square + 1)]
        assert torch.equal(layer(square), selves[0]) and torch.equal(layer(square + 1), selves[1])


# --- whatever changes is seen ---


CHANGES = {
    "replaced": lambda pipe, step, tensors: {"prompt_embeds": tensors["prompt_embeds"] * 0.5} if step == 1 else None,
    "in place": lambda pipe, step, tensors: tensors["prompt_embeds"].mul_(0.5) is None if step == 1 else None,
    "through a view": lambda pipe, step, tensors: tensors["prompt_embeds"][-1, 3:].zero_() is None,
    "a new equal one": lambda pipe, step, tensors: {"prompt_embeds": tensors["prompt_embeds"].clone()},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_callback_that_changes_the_embeddings(any_pipe, kind, count):
    calls = count(any_pipe.unet)
    plain = draw(any_pipe, change=CHANGES[kind])
    assert calls() == STEPS
    with keep_keys_values(any_pipe):
        kept = draw(any_pipe, change=CHANGES[kind])
    assert calls() == (2 if kind in ("replaced", "in place") else STEPS)
    assert same(plain, kept)
    assert same(plain, draw(any_pipe)) == (kind == "a new equal one")


def test_guidance_switched_off_in_the_middle(sd, count):
    def switch_guidance_off(pipe, step, tensors):
        if step == 1:
            pipe._guidance_scale = 0.0
            return {"prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]}

    plain = draw(sd, change=switch_guidance_off)
    calls = count(sd.unet)
    with keep_keys_values(sd):
        kept = draw(sd, change=switch_guidance_off)
    assert calls() == 2
    assert same(plain, kept) and not same(plain, draw(sd))


def with_lora(pipe):
    """Two adapters on to_k and to_v, with weights that matter."""
    targets = ["attn2.to_k", "attn2.to_v", "attn1.to_q"]
    for name in ("one", "two"):
        pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets), name)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in pipe.unet.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    pipe.unet.set_adapters("one")
    pipe.unet.eval()
    return pipe


def test_lora_and_its_scale(any_pipe, count):
    plain = draw(any_pipe)
    pipe = with_lora(any_pipe)
    calls = count(pipe.unet)
    expected = [draw(pipe, cross_attention_kwargs={"scale": scale}) for scale in (1.0, 0.5, 0.0)]
    assert not same(expected[0], expected[1])
    assert same(expected[2], plain)
    calls()
    with keep_keys_values(pipe):
        for scale, pictures in zip((1.0, 0.5, 0.0), expected, strict=True):
            assert same(draw(pipe, cross_attention_kwargs={"scale": scale}), pictures)
            assert calls() == 1


LORA_CHANGES = {
    "another adapter": lambda unet: unet.set_adapters("two"),
    "another weight": lambda unet: unet.set_adapters("one", 0.3),
    "adapters off": lambda unet: unet.disable_adapters(),
    "fused": lambda unet: unet.fuse_lora(),  # at its scale, so that only the order of sums changes
    "unloaded": lambda unet: unet.unload_lora(),
}


@pytest.mark.parametrize("kind", LORA_CHANGES)
def test_a_lora_changed_between_two_steps(sdxl_parts, kind):
    def change(pipe, step, tensors):
        if step == 1:
            LORA_CHANGES[kind](pipe.unet)

    def fresh():
        return with_lora(build(StableDiffusionXLPipeline, sdxl_parts, add_watermarker=False))

    plain = draw(fresh(), change=change)
    pipe = fresh()
    assert not same(plain, draw(pipe))
    with keep_keys_values(pipe):
        assert same(draw(pipe, change=change), plain)


@pytest.fixture
def inputs(sdxl):
    """What the UNet gets in a step without guidance."""
    with torch.no_grad():
        embeds, _, pooled, _ = sdxl.encode_prompt("a cat", do_classifier_free_guidance=False)
    return {
        "sample": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)),
        "timestep": 500,
        "encoder_hidden_states": embeds,
        "added_cond_kwargs": {"text_embeds": pooled, "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]])},
    }


@torch.no_grad()
def test_one_tensor_under_two_lora_scales_and_two_weights(sdxl, inputs, count):
    unet = with_lora(sdxl).unet

    def outputs():
        scaled = [unet(**inputs, cross_attention_kwargs={"scale": scale}).sample for scale in (1.0, 1.0, 0.4, 1.0)]
        layer = cross_layers(unet)[0]
        layer.to_k.base_layer.weight.mul_(2)
        changed = [unet(**inputs).sample]
        layer.to_k.base_layer.weight.mul_(0.5)
        return [*scaled, *changed, unet(**inputs).sample]

    calls = count(unet)
    plain = outputs()
    assert calls() == 6
    with keep_keys_values(sdxl):
        kept = outputs()
        kept_calls = calls()
    assert same(plain, kept)
    assert not torch.equal(plain[0], plain[2]) and not torch.equal(plain[0], plain[4])
    # 1.0, 0.4, 1.0 everywhere, and one layer twice more
    assert kept_calls == pytest.approx(3 + 2 / len(cross_layers(unet)))


@torch.no_grad()
@pytest.mark.parametrize("name", ["to_k", "to_v"])
def test_one_tensor_under_weights_that_change(sdxl, inputs, name):
    layer = cross_layers(sdxl.unet)[0]
    projection, other = getattr(layer, name), copy.deepcopy(getattr(layer, name))
    other.weight.data.mul_(3)

    def outputs():
        first = sdxl.unet(**inputs).sample
        setattr(layer, name, other)
        replaced = sdxl.unet(**inputs).sample
        other.weight.mul_(2)
        changed = sdxl.unet(**inputs).sample
        other.weight.mul_(0.5)
        setattr(layer, name, projection)
        return [first, replaced, changed]

    assert other.weight._version == projection.weight._version
    plain = outputs()
    other = copy.deepcopy(other)
    with keep_keys_values(sdxl):
        assert same(outputs(), plain)
    assert not torch.equal(plain[0], plain[1]) and not torch.equal(plain[0], plain[2])


def test_gradients_are_those_of_the_plain_run(sdxl, inputs):
    embeds = inputs["encoder_hidden_states"]

    def gradients():
        found = []
        for _ in range(2):
            leaf = embeds.clone().requires_grad_()
            for _ in range(2):
                sdxl.unet(**{**inputs, "encoder_hidden_states": leaf}).sample.square().sum().backward()
            found.append(leaf.grad)
        return found

    plain = gradients()
    assert plain[0].abs().sum() > 0
    with keep_keys_values(sdxl):
        with torch.no_grad():
            sdxl.unet(**inputs)  # what was kept without a graph is not used where one is wanted
        assert same(gradients(), plain)


@torch.no_grad()
def test_weights_that_are_fetched_a_layer_at_a_time(sdxl, inputs, count):
    plain = sdxl.unet(**inputs).sample
    cpu_offload(sdxl.unet, execution_device=torch.device("cpu"))
    assert cross_layers(sdxl.unet)[0].to_k.weight.device.type == "meta"
    calls = count(sdxl.unet)
    with keep_keys_values(sdxl):
        outputs = [sdxl.unet(**inputs).sample for _ in range(3)]
    assert calls() <= 2  # nothing kept would be 3
    assert same(outputs, [plain] * 3)


# --- nothing is left behind ---


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_processors_are_put_back_after_an_error(sdxl, error):
    def stop(pipe, step, tensors):
        raise error("stop")

    before = processors(sdxl)
    with pytest.raises(error), keep_keys_values(sdxl):
        assert sum(now is not then for now, then in zip(processors(sdxl), before, strict=True)) == len(before) / 2
        draw(sdxl, change=stop)
    assert all(now is then for now, then in zip(processors(sdxl), before, strict=True))


def test_a_processor_set_meanwhile_stays(sdxl):
    chosen = AttnProcessor()
    with keep_keys_values(sdxl):
        layer, *others = cross_layers(sdxl.unet)
        layer.set_processor(chosen)
        draw(sdxl)
    assert layer.processor is chosen
    assert {type(other.processor) for other in others} == {AttnProcessor2_0}


def test_keys_and_values_are_freed_with_the_embeddings_and_with_the_context(sdxl, inputs):
    made = []
    layer = cross_layers(sdxl.unet)[0]
    alive_before = []
    layer.to_k.register_forward_pre_hook(lambda module, args: alive_before.extend(alive()))
    layer.to_k.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))

    def alive():
        return [key() is not None for key in made]

    gc.disable()  # reference counts alone must do
    try:
        with keep_keys_values(sdxl), torch.no_grad():
            held = inputs["encoder_hidden_states"]
            sdxl.unet(**inputs)
            sdxl.unet(**inputs)
            assert alive() == [True]
            other = {**inputs, "encoder_hidden_states": held.clone()}
            sdxl.unet(**other)
            assert alive() == [False, True]
            del other
            assert alive() == [False, False]
            draw(sdxl)
            assert alive() == [False, False, False]
            sdxl.unet(**inputs)
            assert alive() == [False, False, False, True]
        assert not any(alive())
        assert len(alive_before) == 6 and not any(alive_before)  # never two prompts' at once
    finally:
        gc.enable()


def test_one_inside_another_changes_nothing(sdxl, count):
    plain, calls = draw(sdxl), count(sdxl.unet)
    with keep_keys_values(sdxl):
        with keep_keys_values(sdxl):
            assert same(draw(sdxl), plain)
            assert calls() == 1
        assert same(draw(sdxl), plain)
        assert calls() == 1
    assert same(draw(sdxl), plain)
    assert calls() == STEPS


# --- refusals ---


class OwnProcessor(AttnProcessor2_0):
    pass


def ip_adapter(pipe):
    for layer in cross_layers(pipe.unet):
        layer.set_processor(IPAdapterAttnProcessor2_0(layer.inner_dim, layer.cross_attention_dim))


REFUSED = {
    r"unet\.down_blocks.*IPAdapterAttnProcessor2_0.*pipe\.unload_ip_adapter\(\)": ip_adapter,
    r"FusedAttnProcessor2_0.*pipe\.unfuse_qkv_projections\(\)": lambda pipe: pipe.fuse_qkv_projections(),
    r"SlicedAttnProcessor.*pipe\.disable_attention_slicing\(\)": lambda pipe: pipe.enable_attention_slicing(1),
    r"XFormers.*pipe\.disable_xformers_memory_efficient_attention\(\)": lambda pipe: pipe.unet.set_attn_processor(
        XFormersAttnProcessor()
    ),
    r"OwnProcessor.*pipe\.unet\.set_attn_processor\(AttnProcessor2_0\(\)\)": lambda pipe: pipe.unet.set_attn_processor(
        OwnProcessor()
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_processors_are_refused_with_a_way_out(sdxl, message):
    expected = draw(sdxl)
    REFUSED[message](sdxl)
    before = processors(sdxl)
    with pytest.raises(ValueError, match=message) as refusal, keep_keys_values(sdxl):
        pass
    assert all(now is then for now, then in zip(processors(sdxl), before, strict=True))
    eval(
        re.search(r"Call (pipe\..*\)) before", str(refusal.value))[1],
        {"pipe": sdxl, "AttnProcessor2_0": AttnProcessor2_0},
    )
    with keep_keys_values(sdxl):
        assert same(draw(sdxl), expected)


@pytest.mark.parametrize("part", ["unet", "unet.mid_block", "unet.mid_block.attentions.0", "wrapper"])
def test_a_compiled_unet_is_refused(sdxl, part):
    if part == "wrapper":
        sdxl.unet = torch.compile(sdxl.unet, backend="eager")
    else:
        operator.attrgetter(part)(sdxl).compile(backend="eager")
    with pytest.raises(ValueError, match=r"pipe\.unet` is compiled.*one of the two"), keep_keys_values(sdxl):
        pass


def test_a_pipeline_without_such_a_unet_is_refused():
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8,),
        norm_num_groups=8,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    pipe = DDPMPipeline(unet, DDIMScheduler())
    with pytest.raises(ValueError, match="DDPMPipeline has no UNet2DConditionModel"), keep_keys_values(pipe):
        pass


def test_inference_mode_is_refused_and_no_grad_is_not(sdxl):
    with keep_keys_values(sdxl):
        with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.inference_mode\(\).*torch\.no_grad\(\)"):
            draw(sdxl)
        with torch.no_grad():
            draw(sdxl)


def test_weights_fetched_ahead_are_refused(sdxl):
    apply_group_offloading(sdxl.unet, torch.device("cpu"), offload_type="leaf_level")
    expected = draw(sdxl)
    with keep_keys_values(sdxl):
        assert same(draw(sdxl), expected)
    # Streams need an accelerator, so only what tells of one is put in.
    hook = cross_layers(sdxl.unet)[0].to_k._diffusers_hook.get_hook("group_offloading")
    hook.config.stream = object()
    with pytest.raises(ValueError, match=r"to_k are fetched.*use_stream=False"), keep_keys_values(sdxl):
        pass
