"""Other libraries with a wrapped model and optimizer: transformers.Trainer, Accelerate, and adapters of peft."""

import accelerate
import peft
import pytest
import torch
import transformers
from support import rounding
from support.user_models import small_llama
from support.wrapped_models import plain_optimizer, same_values, small_gpt2, tokens, train, units_of_modules, values_of, wrap

import sluice.torch


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = tokens(i, rows=1)[0] % 256
        return {"input_ids": ids, "labels": ids}


def place_of(model, place, **options):
    return plain_optimizer(model) if place is None else wrap(model, place, **options)[1]


def check_as_plain(run):
    """Checks that run(place) returns the same losses and values."""
    (plain, _), (memory, values), (disk, values_on_disk) = run(None), run("memory"), run("disk")
    assert len(memory) > 3 and memory == disk and same_values(values, values_on_disk)
    assert rounding.near(memory, plain, rounding.of_losses(rounding.of_model(small_gpt2())))


# ---- transformers.Trainer ----


def trainer_of(model, optimizer, out, **settings):
    given = {
        "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "report_to": [], "seed": 3,
        "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "dataloader_pin_memory": False,
    } | settings  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(out), **given),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        optimizers=(optimizer, schedule),
    )


def test_trainer(tmp_path):
    settings = {
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip

    def run(place):
        torch.manual_seed(3)
        model = small_llama()
        trainer = trainer_of(model, place_of(model, place), tmp_path, **settings)
        trainer.train()
        history = trainer.state.log_history
        seen = [entry[key] for entry in history for key in ("loss", "grad_norm", "eval_loss") if key in entry]
        values = values_of(model)
        if place is not None:
            sluice.torch.close(model)
        return seen, values

    check_as_plain(run)


def test_a_trainer_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path):
    def run(out, resume=None):
        torch.manual_seed(3)
        model = small_llama()
        trainer = trainer_of(model, place_of(model, "disk"), tmp_path / out, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        values = values_of(model)
        trainer.save_model(tmp_path / out / "saved")
        assert same_values(values, values_of(transformers.LlamaForCausalLM.from_pretrained(tmp_path / out / "saved")))
        sluice.torch.close(model)
        return values

    whole = run("first")
    assert same_values(run("second", resume=str(tmp_path / "first" / "checkpoint-2")), whole)


def test_a_trainer_that_is_not_given_the_optimizer_is_refused(tmp_path):
    model = small_llama()
    wrap(model, "disk")
    settings = {"use_cpu": True, "report_to": [], "max_steps": 1, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), **settings)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    with pytest.raises(sluice.StateError, match=r"'\S+weight' is .*wrapped.*optimizers=\(optimizer"):
        trainer.train()
    sluice.torch.close(model)


# ---- Accelerate ----


def test_accelerate():
    def run(place):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(3)
        model = small_gpt2()
        optimizer = place_of(model, place)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        loader = torch.utils.data.DataLoader(Texts(), batch_size=2)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        seen = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.append(loss.item())
        values = values_of(model)
        if place is not None:
            sluice.torch.close(accelerator.unwrap_model(model))
        return seen, values

    check_as_plain(run)


# ---- peft ----


def plain_base():
    torch.manual_seed(3)
    return small_llama()


def adapted():
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(plain_base(), config)


def adapters_loss(model, step):
    ids = tokens(step) % 256
    return model(input_ids=ids, labels=ids).loss


def test_adapters():
    def run(place):
        model = adapted()
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        optimizer = place_of(model, place, units=units_of_modules(model))
        seen = train(model, optimizer, adapters_loss)
        if place is not None:
            assert sluice.torch.engine_of(model).counters().touches == 0, "a hook has missed a parameter"
        values = values_of(model)
        assert all(torch.equal(values[name], before) for name, before in frozen.items())
        if place is not None:
            sluice.torch.close(model)
        return seen.values, values

    check_as_plain(run)


def test_an_adapter_that_is_switched_off(tmp_path):
    model = adapted()
    ids = tokens(0) % 256
    with torch.no_grad():
        before = model(input_ids=ids).logits
    optimizer = wrap(model, "disk")[1]
    train(model, optimizer, adapters_loss, steps=3)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, before)
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, before)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain_base(), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    sluice.torch.close(model)
