"""Faults of loss, log-probs and layouts."""

from tests.mutations.mutation import distributed, unit

_LOSS = [
    unit(
        "mean_per_rank",
        "algo/packing.py",
        "concatenate(samples, [trees[t] for t in bin_], ",
        "concatenate([samples[t] for t in rank], [[rank.index(t)] for t in bin_], ",
        "packing.py::test_random_minibatches[False-0]",
        "assert value == pytest.approx(expected[token] * scale",
    ),
    unit(
        "mean_per_micro_batch",
        "algo/packing.py",
        "sum(sample.num_valid for sample in minibatch)",
        "sum(minibatch[i].num_valid for tree in chosen for i in tree)",
        "packing.py::test_random_minibatches[False-0]",
        "assert value == pytest.approx(expected[token] * scale",
    ),
    unit(
        "masked_response_counts_as_one_token",
        "algo/aggregation.py",
        "np.array([mask.sum() for mask in masks]",
        "np.array([max(mask.sum(), 1) for mask in masks]",
        "aggregation.py::test_masked_responses_in_all_aggregations",
        "Not equal to tolerance",
    ),
    unit(
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
    unit(
        "masked_tokens_in_the_denominator",
        "algo/samples.py",
        "    masks = [sample.mask for sample in minibatch]\n",
        "    masks = [np.ones_like(sample.mask) for sample in minibatch]\n",
        "aggregation.py::test_weights_count_the_minibatch_only",
        "assert [",
    ),
    unit(
        "std_over_the_whole_batch",
        "algo/samples.py",
        "group_advantages(group.reward, advantage, std_eps)",
        "(group.reward - group.reward.mean()) / (np.concatenate([g.reward for g in groups]).std(ddof=1) + std_eps)",
        "advantages.py::test_every_group_has_a_mean_and_a_spread_of_its_own",
        "Arrays are not equal",
    ),
    unit(
        "eos_dropped_from_the_mask",
        "algo/samples.py",
        "mask=np.full(length, not (overlong_filter and cut)),",
        "mask=np.arange(length) < (0 if overlong_filter and cut else length - (not cut)),",
        "advantages.py::test_sample_layout",
        "assert first.mask.tolist() == [True] * 4",
    ),
    unit(
        "upper_clip_as_tight_as_the_lower",
        "algo/objective.py",
        "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)",
        "ratio.clamp(1.0 - clip_low, 1.0 + clip_low)",
        "objective.py::test_clips_by_hand[1.5-2.0--2.56-0.0-clipped_high]",
        "assert value == pytest.approx(loss",
    ),
    unit(
        "clipped_ratio_without_the_minimum",
        "algo/objective.py",
        "torch.minimum(ratio * advantage, ratio.clamp",
        "torch.maximum(ratio * advantage, ratio.clamp",
        "objective.py::test_clips_by_hand[1.5-2.0--2.56-0.0-clipped_high]",
        "assert value == pytest.approx(loss",
    ),
    unit(
        "masked_nan_reaches_the_loss",
        "algo/objective.py",
        "new = torch.where(mask, logprobs.float(), zero)",
        "new = mask * logprobs.float()",
        "objective.py::test_garbage_at_masked_places_has_no_influence[nan]",
        "assert loss.item() == clean[0]",
    ),
    unit(
        "importance_cap_ignored",
        "algo/off_policy.py",
        ".exp().clamp(max=importance_cap)",
        ".exp()",
        "off_policy.py::test_with_a_cap_all_have_the_trainers_and_a_weight",
        "assert importance.tolist() == pytest.approx(",
    ),
    unit(
        "gradient_through_the_importance_weight",
        "algo/objective.py",
        "importance.detach()",
        "importance",
        "off_policy.py::test_no_gradient_goes_into_the_weight",
        "assert new.grad.tolist() == pytest.approx(",
    ),
    unit(
        "learning_rate_per_mini_batch",
        "train.py",
        "await policy.update(index, learning_rate(cfg, step))",
        "await policy.update(index, learning_rate(cfg, (step - 1) * len(minibatches) + index + 1))",
        "train.py::test_a_step_updates_at_one_learning_rate_and_publishes_the_result",
        "update(0, 1e-06) != call.cluster.policy.update(0, 5e-07)",
    ),
]

_LOGPROBS = [
    unit(
        "temperature_left_out",
        "ops/torch_kernels.py",
        "below.mul_(inverse_temperature * LOG2_E)",
        "below.mul_(LOG2_E)",
        "linear_logprob.py::test_values_and_gradients_fp32[0.6-13]",
        "Tensor-likes are not close",
    ),
    unit(
        "temperature_left_out_of_the_gradient",
        "ops/torch_kernels.py",
        "torch.exp(-softmax.log_total) * -inverse_temperature",
        "-torch.exp(-softmax.log_total)",
        "linear_loss.py::test_values_and_gradients_fp32[True-0.0-13]",
        "Tensor-likes are not close",
    ),
    unit(
        "entropy_gradient_without_the_entropy",
        "ops/torch_kernels.py",
        "softmax.entropy - softmax.log_total",
        "1.0 - softmax.log_total",
        "linear_logprob.py::test_values_and_gradients_fp32[1.0-13]",
        "Tensor-likes are not close",
    ),
    unit(
        "padding_rows_in_the_softmax",
        "ops/linear_logprob.py",
        "weight=weight.detach()[:num_rows]",
        "weight=weight.detach()",
        "linear_logprob.py::test_padding_rows_are_outside_the_vocabulary",
        "Tensor-likes are not close",
    ),
    unit(
        "upstream_gradient_ignored",
        "ops/linear_logprob.py",
        "if missing and main_grad.in_place:",
        "if False:",
        "linear_loss.py::test_any_upstream_gradient[1.0-True-3.0]",
        "Tensor-likes are not close",
    ),
    unit(
        "gradients_added_without_grad",
        "ops/linear_logprob.py",
        "if not torch.is_grad_enabled():",
        "if False:",
        "linear_loss.py::test_nothing_is_added_without_grad",
        "assert (",
    ),
    unit(
        "stand_in_gradient_of_a_tied_weight_is_garbage",
        "ops/main_grad.py",
        "torch.zeros_like(weight) if getattr",
        "torch.ones_like(weight) if getattr",
        "linear_loss.py::test_a_weight_of_two_layers_gets_zeros_from_here",
        "assert (",
    ),
    distributed(
        "softmax_of_the_own_shard",
        "ops/linear_logprob.py",
        "whole_softmax(head.shard_stats(tile, places), head.group)",
        "whole_softmax(head.shard_stats(tile, places), None)",
        "vocab_parallel.py::test_sharded_vocabulary[2-0-True]",
        "not close",
    ),
]

_LAYOUTS = [
    distributed(
        "extra_factor_of_the_context_parallel_size",
        "policy/policy.py",
        "    return loss, torch.tensor(batch.num_valid, dtype=torch.int), batch.stats\n",
        "    cp = parallel_state.get_context_parallel_world_size()\n"
        "    return loss * cp, torch.tensor(batch.num_valid, dtype=torch.int), batch.stats\n",
        "invariance.py::test_every_layout_gives_the_same[CP2-full recomputation-qwen2_tied]",
        "gradient norm",  # the gradients themselves are clipped to the same length
    ),
    distributed(
        "gradients_of_a_rank_not_reduced",
        "policy/policy.py",
        "config.finalize_model_grads_func = finalize_model_grads",
        "config.finalize_model_grads_func, ddp_config.overlap_grad_reduce = None, False",
        "invariance.py::test_every_layout_gives_the_same[DP2-padded-llama_untied]",
        "relative error",
    ),
    distributed(
        "tied_gradient_not_reduced",
        "policy/policy.py",
        "config.finalize_model_grads_func = finalize_model_grads",
        "config.finalize_model_grads_func = finalize_model_grads\n"
        "        for chunk in self.gpt:\n"
        "            chunk.share_embeddings_and_output_weights = False",
        "invariance.py::test_every_layout_gives_the_same[PP2-micro-batches of 2-qwen2_tied]",
        "model.embed_tokens.weight: relative error",
    ),
    distributed(
        "gradient_of_sequence_parallel_norms_not_reduced",
        "policy/attention.py",
        "self.weight.sequence_parallel = config.sequence_parallel",
        "self.weight.sequence_parallel = False",
        "invariance.py::test_every_layout_gives_the_same[TP2+SP-micro-batches of 1-llama_tied]",
        "norm.weight: relative error",
    ),
    distributed(
        "temperature_left_out_of_the_policy",
        "policy/policy.py",
        "head = self.shape.vocab_size, cfg.rollout.temperature,",
        "head = self.shape.vocab_size, 1.0,",
        "invariance.py::test_old_logprobs_equal_transformers[one rank]",
        "Not equal to tolerance",
    ),
    distributed(
        "stale_tokens_get_new_old_logprobs",
        "algo/off_policy.py",
        "torch.where(stale, engine, trainer), None",
        "trainer, None",
        "invariance.py::test_every_layout_gives_the_same[one rank-token budget-llama_untied]",
        "assert min(clipped) > 0",
    ),
    distributed(
        "importance_of_the_updated_policy",
        "policy/policy.py",
        "else batch.importance[tokens]",
        "else (logprobs - engine).exp().clamp(max=importance_cap)",
        "invariance.py::test_every_layout_gives_the_same[DP2-importance weights-qwen2_tied]",
        "model.embed_tokens.weight: relative error",
    ),
    distributed(
        "norms_and_biases_decayed",
        "policy/policy.py",
        'self.cfg.optimizer.weight_decay * group["wd_mult"]',
        "self.cfg.optimizer.weight_decay",
        "state.py::test_weight_decay_spares_norms_and_biases",
        "norm.weight",
    ),
    distributed(
        "optimizer_state_of_a_padded_bucket_shifted",
        "policy/checkpoint.py",
        "        fixes.keep_bucket_padding(part)\n",
        "",
        "state.py::test_resume_is_bit_for_bit[PP2-llama_tied-float32]",
        "assert all(torch.equal(whole[name], resumed[name])",
    ),
]

MUTATIONS = [*_LOSS, *_LOGPROBS, *_LAYOUTS]
