// One instruction set's Table. Included in an anonymous namespace, last.

template <class V, template <class> class R, class MasterStream, int M, DType D>
void fill_gradient(Table& t, int rule) {
    constexpr int d = int(D);
    t.update[rule][M][0][d] = update_plain<V, R, MasterStream, F32, F32, D>;
    if constexpr (R<V>::has_a || R<V>::has_b) {
        t.update[rule][M][1][d] = update_plain<V, R, MasterStream, Bf16, F32, D>;
        t.update[rule][M][2][d] = update_coded<V, R, MasterStream, D>;
    } else {  // without states there is one form of them
        t.update[rule][M][1][d] = t.update[rule][M][2][d] = t.update[rule][M][0][d];
    }
}

template <class V, template <class> class R, class MasterStream, int M> void fill_master(Table& t, Rule rule) {
    fill_gradient<V, R, MasterStream, M, DType::f32>(t, int(rule));
    fill_gradient<V, R, MasterStream, M, DType::bf16>(t, int(rule));
    fill_gradient<V, R, MasterStream, M, DType::f16>(t, int(rule));
}

template <class V, template <class> class R> void fill_rule(Table& t, Rule rule) {
    fill_master<V, R, Full, int(Master::full)>(t, rule);
    fill_master<V, R, Split, int(Master::split)>(t, rule);
}

template <class V, DType D> void fill_reductions(Table& t) {
    t.accumulate[int(D)] = accumulate<V, D>;
    t.norm_squared[int(D)] = norm_squared<V, D>;
    t.count_nonfinite[int(D)] = count_nonfinite<V, D>;
}

template <class V> Table make_table() {
    Table t{};
    fill_rule<V, AdamRule>(t, Rule::adam);
    fill_rule<V, LionRule>(t, Rule::lion);
    fill_rule<V, AdagradRule>(t, Rule::adagrad);
    fill_rule<V, MomentumRule>(t, Rule::sgd_momentum);
    fill_rule<V, SgdRule>(t, Rule::sgd);
    fill_reductions<V, DType::f32>(t);
    fill_reductions<V, DType::bf16>(t);
    fill_reductions<V, DType::f16>(t);
#ifdef ZERO_OPTIM_ROOFLINE
    fill_roofline<V>(t);
#endif
    return t;
}
