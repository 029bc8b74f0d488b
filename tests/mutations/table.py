"""The faults: each is one change of the code, with the test that has to notice it and a piece of what that test then says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str  # stands in the file exactly once
    new: str
    test: str  # node id
    says: str  # the reason for the failure: a part of the failing assertion


def _unit(name: str, file: str, old: str, new: str, test: str, says: str) -> Mutation:
    return Mutation(name, f"dapo_megatron/{file}", old, new, f"tests/unit/test_{test}", says)


def _distributed(name: str, file: str, old: str, new: str, test: str, says: str) -> Mutation:
    return Mutation(name, f"dapo_megatron/{file}", old, new, f"tests/distributed/test_{test}", says)


_LOSS = [
    _unit(
        "mean_per_rank",
        "algo/packing.py",
        "concatenate(samples, bin_, ",
        "concatenate([samples[i] for i in rank], [rank.index(i) for i in bin_], ",
        "packing.py::test_random_minibatches[0]",
        "assert value == pytest.approx(expected[token] * scale",
    ),
    _unit(
        "mean_per_micro_batch",
        "algo/packing.py",
        "sum(sample.num_valid for sample in minibatch)",
        "sum(minibatch[i].num_valid for i in chosen)",
        "packing.py::test_random_minibatches[0]",
        "assert value == pytest.approx(expected[token] * scale",
    ),
    _unit(
        "masked_response_counts_as_one_token",
        "algo/aggregation.py",
        "np.array([mask.sum() for mask in masks]",
        "np.array([max(mask.sum(), 1) for mask in masks]",
        "aggregation.py::test_masked_responses_in_all_aggregations",
        "Not equal to tolerance",
    ),
    _unit(
        "empty_micro_batch_counts_one_token",
        "records.py",
        """Megatron divides by N)

    @property
    def num_valid(self) -> int:
        return int(self.mask.sum())""",
        """Megatron divides by N)

    @property
    def num_valid(self) -> int:
        return max(int(self.mask.sum()), 1)""",
        "packing.py::test_fewer_samples_than_ranks_gives_dummies_without_response",
        "== dummy.num_valid == 0",
    ),
    _unit(
        "masked_tokens_in_the_denominator",
        "algo/samples.py",
        "    masks = [sample.mask for sample in minibatch]\n",
        "    masks = [np.ones_like(sample.mask) for sample in minibatch]\n",
        "aggregation.py::test_weights_count_the_minibatch_only",
        "assert [",
    ),
    _unit(
        "std_over_the_whole_batch",
        "algo/samples.py",
        "group_advantages(group.reward, advantage, std_eps)",
        "(group.reward - group.reward.mean()) / (np.concatenate([g.reward for g in groups]).std(ddof=1) + std_eps)",
        "advantages.py::test_every_group_has_a_mean_and_a_spread_of_its_own",
        "Arrays are not equal",
    ),
    _unit(
        "eos_dropped_from_the_mask",
        "algo/samples.py",
        "mask=np.full(length, not (overlong_filter and cut)),",
        "mask=np.arange(length) < (0 if overlong_filter and cut else length - (not cut)),",
        "advantages.py::test_sample_layout",
        "assert first.mask.tolist() == [True] * 4",
    ),
    _unit(
        "upper_clip_as_tight_as_the_lower",
        "algo/objective.py",
        "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)",
        "ratio.clamp(1.0 - clip_low, 1.0 + clip_low)",
        "objective.py::test_clips_by_hand[1.5-2.0--2.56-0.0-clipped_high]",
        "assert value == pytest.approx(loss",
    ),
    _unit(
        "clipped_ratio_without_the_minimum",
        "algo/objective.py",
        "torch.minimum(ratio * advantage, ratio.clamp",
        "torch.maximum(ratio * advantage, ratio.clamp",
        "objective.py::test_clips_by_hand[1.5-2.0--2.56-0.0-clipped_high]",
        "assert value == pytest.approx(loss",
    ),
    _unit(
        "masked_nan_reaches_the_loss",
        "algo/objective.py",
        "new = torch.where(mask, logprobs.float(), zero)",
        "new = mask * logprobs.float()",
        "objective.py::test_garbage_at_masked_places_has_no_influence[nan]",
        "assert loss.item() == clean[0]",
    ),
    _unit(
        "learning_rate_per_mini_batch",
        "train.py",
        "await policy.update(index, learning_rate(cfg, step))",
        "await policy.update(index, learning_rate(cfg, (step - 1) * len(minibatches) + index + 1))",
        "train.py::test_a_step_updates_at_one_learning_rate_and_publishes_the_result",
        "update(0, 1e-06) != call.cluster.policy.update(0, 5e-07)",
    ),
]

_LOGPROBS = [
    _unit(
        "temperature_left_out",
        "ops/linear_logprob.py",
        ".to(_compute_dtype(hidden)).div_(temperature)",
        ".to(_compute_dtype(hidden))",
        "linear_logprob.py::test_values_and_gradients_fp32[0.6-13]",
        "Tensor-likes are not close",
    ),
    _unit(
        "temperature_left_out_of_the_gradient",
        "ops/linear_logprob.py",
        "d_logits.div_(temperature).to(hidden.dtype)",
        "d_logits.to(hidden.dtype)",
        "linear_logprob.py::test_values_and_gradients_fp32[0.6-13]",
        "Tensor-likes are not close",
    ),
    _unit(
        "entropy_gradient_without_the_entropy",
        "ops/linear_logprob.py",
        "(finite + entropy[rows, None])",
        "(finite + 1.0)",
        "linear_logprob.py::test_values_and_gradients_fp32[1.0-13]",
        "Tensor-likes are not close",
    ),
    _unit(
        "padding_rows_in_the_softmax",
        "ops/linear_logprob.py",
        "if num_rows < logits.shape[1]:",
        "if num_rows < 0:",
        "linear_logprob.py::test_padding_rows_are_outside_the_vocabulary",
        "Tensor-likes are not close",
    ),
]

_ROLLOUT = [
    _unit(
        "dynamic_sampling_on_the_shaped_reward",
        "rollout/sampler.py",
        "return 0 < int(group.correct.sum()) < len(group.correct)",
        "return bool(group.reward.min() < group.reward.max())",
        "sampler.py::test_filter_looks_at_the_raw_verdict_never_at_the_shaped_reward",
        "assert not is_informative(",
    ),
    _unit(
        "accept_by_finishing_order",
        "rollout/sampler.py",
        "            if self.queue[0].group is None:\n",
        "            self.queue = deque(sorted(self.queue, key=lambda entry: entry.group is None))\n"
        "            if self.queue[0].group is None:\n",
        "sampler.py::test_short_responses_are_not_preferred",
        "== [0, 1, 2, 3]",
    ),
    _unit(
        "rewind_off_by_one",
        "rollout/sampler.py",
        "self.sampler.stream.position = self.position\n",
        "self.sampler.stream.position = self.position + 1\n",
        "sampler.py::test_three_groups_one_kept_three_counted",
        "assert sampler.stream.position == 3",
    ),
    _unit(
        "carried_groups_lost_on_resume",
        "rollout/sampler.py",
        'self.carried = [_load_entry(entry) for entry in state["carried"]]',
        "self.carried = []",
        "sampler.py::test_carry_continues_partial_groups_and_survives_a_restart",
        "assert content(batch) == content(expected)",
    ),
    _unit(
        "tokens_of_other_weights_accepted",
        "rollout/sampler.py",
        "if (new.versions != self.version).any():",
        "if (new.versions > self.version).any():",
        "sampler_faults.py::test_other_weights_than_the_published_ones_are_an_error",
        "DID NOT RAISE",
    ),
    _unit(
        "prompt_position_off_by_one_after_resume",
        "data/stream.py",
        'self.position = int(state["position"])',
        'self.position = int(state["position"]) + 1',
        "data_stream.py::test_resume_goes_on_where_it_stopped[7]",
        "assert take(resumed, 15) == expected",
    ),
    _unit(
        "overlong_penalty_unclamped",
        "reward/overlong.py",
        "np.clip(share, 0.0, 1.0)",
        "np.maximum(share, 0.0)",
        "reward_scoring.py::test_soft_overlong_at_between_and_beyond_its_corners",
        "Not equal to tolerance",
    ),
    _unit(
        "overlong_penalty_counts_the_prompt",
        "reward/scoring.py",
        "soft_overlong_penalty([len(c) for c in completions]",
        "soft_overlong_penalty([len(prompt.token_ids) + len(c) for c in completions]",
        "reward_scoring.py::test_score_builds_the_group",
        "assert group.overlong_penalty.tolist() == ",
    ),
]

_WEIGHTS = [
    _unit(
        "publish_skipped",
        "train.py",
        "await run.publisher.publish(version=step)",
        "pass",
        "train.py::test_a_step_updates_at_one_learning_rate_and_publishes_the_result",
        "Right contains one more item: call.publisher.publish(version=4)",
    ),
    _unit(
        "publish_sends_nothing",
        "weights/publish.py",
        "await self._trainer.send_weights(version)",
        "pass",
        "publish.py::test_order",
        'calls.names == ["begin", "send", "end"]',
    ),
    _unit(
        "prefix_cache_not_flushed",
        "rollout/sglang_engine.py",
        'await self._control(server, "/flush_cache?timeout=30", {})',
        "pass",
        "sglang_contract.py::test_old_weights_keys_and_values_are_never_used_again",
        "'/begin_weight_update' != '/flush_cache'",
    ),
    _unit(
        "prefix_cache_shared_by_versions",
        "rollout/sglang_engine.py",
        """            # Keeps the prefix caches of different weights apart.
            "extra_key": str(self.version),""",
        """            "extra_key": "0",""",
        "sglang_contract.py::test_old_weights_keys_and_values_are_never_used_again",
        "'/generate 0' != '/generate 3'",
    ),
    _unit(
        "one_name_unmapped",
        "weights/mapping.py",
        '    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), "replicated", (("hidden",),)),\n',
        "",
        "mapping.py::test_unknown_and_missing_names_are_named",
        "don't fit a qwen2 model: unknown extra.weight",
    ),
    _unit(
        "unknown_names_skipped_in_silence",
        "weights/mapping.py",
        "    if problems:\n",
        "    if expected - present:\n",
        "mapping.py::test_unknown_and_missing_names_are_named",
        "DID NOT RAISE",
    ),
    _unit(
        "qkv_not_interleaved_per_group",
        "weights/mapping.py",
        "torch.cat(per_group, dim=1).chunk(tp)[rank].flatten(0, 1)",
        "torch.cat([t.flatten(0, 1).chunk(tp)[rank] for t in per_group])",
        "mapping.py::test_qkv_is_interleaved_per_query_group",
        "== [0, 1, 10, 20, 2, 3, 11, 21]",
    ),
    _unit(
        "gate_and_up_swapped",
        "weights/mapping.py",
        '(f"{_HF_LAYER}mlp.gate_proj.weight", f"{_HF_LAYER}mlp.up_proj.weight")',
        '(f"{_HF_LAYER}mlp.up_proj.weight", f"{_HF_LAYER}mlp.gate_proj.weight")',
        "mapping.py::test_gate_and_up_are_stacked_within_every_shard",
        "model.layers.2.mlp.gate_proj.weight",
    ),
    _distributed(
        "experts_of_other_ranks_numbered_as_the_first",
        "policy/weights_io.py",
        "int(found[2]) + first_expert",
        "int(found[2])",
        "invariance.py::test_every_layout_gives_the_same[EP2-token budget-qwen3_moe]",
        "mlp.experts",
    ),
    _unit(
        "gate_and_up_swapped_in_the_shards",
        "weights/mapping.py",
        "torch.cat([t.chunk(tp)[rank] for t in hf])",
        "torch.cat([t.chunk(tp)[rank] for t in reversed(hf)])",
        "mapping.py::test_gate_and_up_are_stacked_within_every_shard",
        "== [2, 3, 12, 13]",
    ),
    _unit(
        "padded_vocabulary_rows_exported",
        "weights/mapping.py",
        "torch.cat(list(shards))[: shape.vocab_size]",
        "torch.cat(list(shards))",
        "mapping.py::test_padded_vocabulary_is_cut_on_the_way_back",
        "assert torch.equal(",
    ),
]

_LAYOUTS = [
    _distributed(
        "extra_factor_of_the_context_parallel_size",
        "policy/policy.py",
        "    return loss, torch.tensor(batch.num_valid, dtype=torch.int), stats\n",
        "    cp = parallel_state.get_context_parallel_world_size()\n"
        "    return loss * cp, torch.tensor(batch.num_valid, dtype=torch.int), stats\n",
        "invariance.py::test_every_layout_gives_the_same[CP2-full recomputation-qwen2_tied]",
        "gradient norm",  # the gradients themselves are clipped to the same length
    ),
    _distributed(
        "gradients_of_a_rank_not_reduced",
        "policy/policy.py",
        "config.finalize_model_grads_func = finalize_model_grads",
        "config.finalize_model_grads_func = None",
        "invariance.py::test_every_layout_gives_the_same[DP2-padded-llama_untied]",
        "relative error",
    ),
    _distributed(
        "tied_gradient_not_reduced",
        "policy/policy.py",
        "config.finalize_model_grads_func = finalize_model_grads",
        "config.finalize_model_grads_func = finalize_model_grads\n"
        "        for chunk in self.gpt:\n"
        "            chunk.share_embeddings_and_output_weights = False",
        "invariance.py::test_every_layout_gives_the_same[PP2-micro-batches of 2-qwen2_tied]",
        "model.embed_tokens.weight: relative error",
    ),
    _distributed(
        "gradient_of_sequence_parallel_norms_not_reduced",
        "policy/attention.py",
        "self.weight.sequence_parallel = config.sequence_parallel",
        "self.weight.sequence_parallel = False",
        "invariance.py::test_every_layout_gives_the_same[TP2+SP-micro-batches of 1-llama_tied]",
        "norm.weight: relative error",
    ),
    _distributed(
        "temperature_left_out_of_the_policy",
        "policy/policy.py",
        "            cfg.rollout.temperature,\n",
        "            1.0,\n",
        "invariance.py::test_old_logprobs_equal_transformers[one rank]",
        "Not equal to tolerance",
    ),
    _distributed(
        "stale_tokens_get_new_old_logprobs",
        "policy/policy.py",
        "torch.where(batch.stale, batch.rollout_logprobs, batch.trainer_logprobs)",
        "batch.trainer_logprobs",
        "invariance.py::test_every_layout_gives_the_same[one rank-token budget-llama_untied]",
        "dual_clipped",
    ),
    _distributed(
        "norms_and_biases_decayed",
        "policy/policy.py",
        'self.cfg.optimizer.weight_decay * group["wd_mult"]',
        "self.cfg.optimizer.weight_decay",
        "state.py::test_weight_decay_spares_norms_and_biases",
        "norm.weight",
    ),
    _distributed(
        "optimizer_state_of_a_padded_bucket_shifted",
        "policy/checkpoint.py",
        "        fixes.keep_bucket_padding(part)\n",
        "",
        "state.py::test_resume_is_bit_for_bit[PP2-llama_tied-float32]",
        "assert all(torch.equal(whole[name], resumed[name])",
    ),
]

MUTATIONS = [*_LOSS, *_LOGPROBS, *_ROLLOUT, *_WEIGHTS, *_LAYOUTS]
