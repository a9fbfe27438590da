"""TRL's SFTTrainer with LoRA on prompts and completions, with README's lines."""

import json

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from benchmarks.real.programs.common import arguments, connect, finish
from diloco import SyncSchedule, replica_share
from diloco.integrations.transformers import DiLoCoCallback

given = arguments(__doc__)
base = given.text.with_name("base")  # a folder with a model and its tokenizer, beside the file of conversations
messages = [json.loads(line)["messages"] for line in given.text.read_text().splitlines()]
pairs = [{"prompt": question["content"], "completion": answer["content"]} for question, answer in messages]
settings = SFTConfig(
    output_dir=str(given.out), max_steps=12, per_device_train_batch_size=2, learning_rate=5e-3, save_steps=7,
    max_length=48, logging_steps=6, report_to="none", use_cpu=True, disable_tqdm=True, seed=0, bf16=False,
    gradient_checkpointing=False,
)  # fmt: skip
tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with connect(given) as transport:
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False), args=settings, processing_class=tokenizer,
        train_dataset=replica_share(Dataset.from_list(pairs), replica=given.replica, num_replicas=2),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
    )  # fmt: skip
    callback = DiLoCoCallback(transport=transport, schedule=SyncSchedule(inner_steps=3, overlap_steps=2), codec="fp4")
    callback.add_to(trainer)
    trainer.train(resume_from_checkpoint=str(given.out / given.resume) if given.resume else None)
    finish(callback.diloco, trainer.model)
