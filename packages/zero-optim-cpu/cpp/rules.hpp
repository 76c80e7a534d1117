// The arithmetic of an update, after torch.optim, in steps that the loops of update_body.hpp place apart:
//
//   moments(p, g, a, b)   p parameter, g gradient already scaled, a and b states: the new states, and in g what
//                         `update` needs of the gradient
//   root(b)               the square root, where there is one
//   update(g, a, root)    the amount to subtract from the parameter, without weight decay
//   apply(p, update)      the new parameter
//
// moments and apply take N vectors, so that an option is looked at once for all of them.
// Multiplications and additions are separate on purpose, on every instruction set (no fma, and -ffp-contract=off): that
// is what makes the bits equal. Included inside an anonymous namespace.

template <class V, int N, class F = typename V::F> ZERO_OPTIM_INLINE void subtract(F (&p)[N], const F (&update)[N]) {
    each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { p[k.value] = V::sub(p[k.value], update[k.value]); });
}

// start + weight * (end - start), from whichever end is nearer, as torch.lerp.
template <class V> struct Lerp {
    using F = typename V::F;
    F weight, rest;
    bool from_end;
    explicit Lerp(const Coefficients& c)
        : weight(V::set(c.c1)), rest(V::set(c.beta1)), from_end(c.lerp_from_gradient) {}
    template <int N> ZERO_OPTIM_INLINE void operator()(F (&start)[N], const F (&end)[N]) const {
        F difference[N];
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { difference[k.value] = V::sub(end[k.value], start[k.value]); });
        if (from_end) {
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
                start[k.value] = V::sub(end[k.value], V::mul(rest, difference[k.value]));
            });
        } else {
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
                start[k.value] = V::add(start[k.value], V::mul(weight, difference[k.value]));
            });
        }
    }
};

// g + weight decay * p (L2); then p minus (update + lr * weight decay * p): the decay joins the update before the one
// subtraction from p, which is the only rounding at p's size.
template <class V> struct Decay {
    using F = typename V::F;
    F coupled, decoupled;
    bool has_coupled, has_decoupled;
    explicit Decay(const Coefficients& c)
        : coupled(V::set(c.coupled)), decoupled(V::set(c.decoupled)), has_coupled(c.coupled != 0.0f),
          has_decoupled(c.decoupled != 0.0f) {}
    template <int N> ZERO_OPTIM_INLINE void gradient(F (&g)[N], const F (&p)[N]) const {
        if (!has_coupled) return;
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { g[k.value] = V::add(g[k.value], V::mul(coupled, p[k.value])); });
    }
    template <int N> ZERO_OPTIM_INLINE void apply(F (&p)[N], const F (&update)[N]) const {
        if (has_decoupled) {
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
                p[k.value] = V::sub(p[k.value], V::add(update[k.value], V::mul(decoupled, p[k.value])));
            });
        } else {
            subtract<V>(p, update);
        }
    }
};

// Adam and AdamW: a = exp_avg, b = exp_avg_sq. Kingma & Ba 2015; Loshchilov & Hutter 2019.
template <class V> struct AdamRule {
    using F = typename V::F;
    static constexpr bool has_a = true, has_b = true;
    Decay<V> decay;
    Lerp<V> lerp;
    F c2, beta2, step_size, denominator_scale, eps;
    explicit AdamRule(const Coefficients& c)
        : decay(c), lerp(c), c2(V::set(c.c2)), beta2(V::set(c.beta2)), step_size(V::set(c.step_size)),
          denominator_scale(V::set(c.denominator_scale)), eps(V::set(c.eps)) {}
    template <int N> ZERO_OPTIM_INLINE void moments(const F (&p)[N], F (&g)[N], F (&a)[N], F (&b)[N]) const {
        decay.gradient(g, p);
        lerp(a, g);
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
            b[k.value] = V::add(V::mul(beta2, b[k.value]), V::mul(V::mul(c2, g[k.value]), g[k.value]));
        });
    }
    ZERO_OPTIM_INLINE F root(F b) const { return V::sqrt(b); }
    ZERO_OPTIM_INLINE F update(F, F a, F root) const {
        return V::div(V::mul(step_size, a), V::add(V::mul(root, denominator_scale), eps));
    }
    template <int N> ZERO_OPTIM_INLINE void apply(F (&p)[N], const F (&update)[N]) const { decay.apply(p, update); }
};

// Lion: a = exp_avg; beta1 and c1 for the direction, beta2 and c2 for the state. Chen et al. 2023.
template <class V> struct LionRule {
    using F = typename V::F;
    static constexpr bool has_a = true, has_b = false;
    Decay<V> decay;
    F c1, beta1, c2, beta2, lr, minus_lr;
    explicit LionRule(const Coefficients& c)
        : decay(c), c1(V::set(c.c1)), beta1(V::set(c.beta1)), c2(V::set(c.c2)), beta2(V::set(c.beta2)),
          lr(V::set(c.step_size)), minus_lr(V::set(-c.step_size)) {}
    template <int N> ZERO_OPTIM_INLINE void moments(const F (&)[N], F (&g)[N], F (&a)[N], F (&)[N]) const {
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
            const F direction = V::add(V::mul(beta1, a[k.value]), V::mul(c1, g[k.value]));
            a[k.value] = V::add(V::mul(beta2, a[k.value]), V::mul(c2, g[k.value]));
            g[k.value] = direction;
        });
    }
    ZERO_OPTIM_INLINE F root(F b) const { return b; }
    ZERO_OPTIM_INLINE F update(F direction, F, F) const {
        const F zero = V::set(0.0f);
        // Neither above nor below zero: zero or NaN, which is passed on.
        return V::select(V::gt(direction, zero), lr, V::select(V::gt(zero, direction), minus_lr, direction));
    }
    template <int N> ZERO_OPTIM_INLINE void apply(F (&p)[N], const F (&update)[N]) const { decay.apply(p, update); }
};

// Adagrad: b = sum. Duchi et al. 2011.
template <class V> struct AdagradRule {
    using F = typename V::F;
    static constexpr bool has_a = false, has_b = true;
    Decay<V> decay;
    F step_size, eps;
    explicit AdagradRule(const Coefficients& c) : decay(c), step_size(V::set(c.step_size)), eps(V::set(c.eps)) {}
    template <int N> ZERO_OPTIM_INLINE void moments(const F (&p)[N], F (&g)[N], F (&)[N], F (&b)[N]) const {
        decay.gradient(g, p);
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
            b[k.value] = V::add(b[k.value], V::mul(g[k.value], g[k.value]));
        });
    }
    ZERO_OPTIM_INLINE F root(F b) const { return V::sqrt(b); }
    ZERO_OPTIM_INLINE F update(F g, F, F root) const { return V::div(V::mul(step_size, g), V::add(root, eps)); }
    template <int N> ZERO_OPTIM_INLINE void apply(F (&p)[N], const F (&update)[N]) const { subtract<V>(p, update); }
};

// SGD with momentum: a = momentum_buffer, which the first step sets to the gradient, undamped. A step without momentum
// leaves it as it is.
template <class V> struct MomentumRule {
    using F = typename V::F;
    static constexpr bool has_a = true, has_b = false;
    Decay<V> decay;
    F momentum, undamped, lr;
    bool nesterov, first, plain;
    explicit MomentumRule(const Coefficients& c)
        : decay(c), momentum(V::set(c.beta1)), undamped(V::set(c.c1)), lr(V::set(c.step_size)), nesterov(c.nesterov),
          first(c.first_step), plain(c.plain) {}
    template <int N> ZERO_OPTIM_INLINE void moments(const F (&p)[N], F (&g)[N], F (&a)[N], F (&)[N]) const {
        decay.gradient(g, p);
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
            if (!plain)
                a[k.value] = first ? g[k.value] : V::add(V::mul(momentum, a[k.value]), V::mul(undamped, g[k.value]));
        });
    }
    ZERO_OPTIM_INLINE F root(F b) const { return b; }
    ZERO_OPTIM_INLINE F update(F g, F a, F) const {
        return V::mul(lr, plain ? g : nesterov ? V::add(g, V::mul(momentum, a)) : a);
    }
    template <int N> ZERO_OPTIM_INLINE void apply(F (&p)[N], const F (&update)[N]) const { subtract<V>(p, update); }
};

template <class V> struct SgdRule {
    using F = typename V::F;
    static constexpr bool has_a = false, has_b = false;
    Decay<V> decay;
    F lr;
    explicit SgdRule(const Coefficients& c) : decay(c), lr(V::set(c.step_size)) {}
    template <int N> ZERO_OPTIM_INLINE void moments(const F (&p)[N], F (&g)[N], F (&)[N], F (&)[N]) const {
        decay.gradient(g, p);
    }
    ZERO_OPTIM_INLINE F root(F b) const { return b; }
    ZERO_OPTIM_INLINE F update(F g, F, F) const { return V::mul(lr, g); }
    template <int N> ZERO_OPTIM_INLINE void apply(F (&p)[N], const F (&update)[N]) const { subtract<V>(p, update); }
};
