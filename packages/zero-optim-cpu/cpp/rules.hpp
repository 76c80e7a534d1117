// The arithmetic of one element, after torch.optim. `Rule<V>(c)(p, g, a, b)`: p parameter, g gradient already scaled,
// a and b states. Multiplications and additions are separate on purpose, on every instruction set (no fma, and
// -ffp-contract=off): that is what makes the bits equal, and the loop waits for memory anyway.
// Included inside an anonymous namespace.

// start + weight * (end - start), from whichever end is nearer, as torch.lerp.
template <class V> struct Lerp {
    using F = typename V::F;
    F weight, rest;
    bool from_end;
    explicit Lerp(const Coefficients& c)
        : weight(V::set(c.c1)), rest(V::set(c.beta1)), from_end(c.lerp_from_gradient) {}
    ZERO_OPTIM_INLINE F operator()(F start, F end) const {
        const F difference = V::sub(end, start);
        if (from_end) return V::sub(end, V::mul(rest, difference));
        return V::add(start, V::mul(weight, difference));
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
    ZERO_OPTIM_INLINE F gradient(F g, F p) const { return has_coupled ? V::add(g, V::mul(coupled, p)) : g; }
    ZERO_OPTIM_INLINE F apply(F p, F update) const {
        return V::sub(p, has_decoupled ? V::add(update, V::mul(decoupled, p)) : update);
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
    ZERO_OPTIM_INLINE void operator()(F& p, F g, F& a, F& b) const {
        g = decay.gradient(g, p);
        a = lerp(a, g);
        b = V::add(V::mul(beta2, b), V::mul(V::mul(c2, g), g));
        const F denominator = V::add(V::mul(V::sqrt(b), denominator_scale), eps);
        p = decay.apply(p, V::div(V::mul(step_size, a), denominator));
    }
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
    ZERO_OPTIM_INLINE void operator()(F& p, F g, F& a, F&) const {
        const F zero = V::set(0.0f);
        const F direction = V::add(V::mul(beta1, a), V::mul(c1, g));
        // Neither above nor below zero: zero or NaN, which is passed on.
        const F update = V::select(V::gt(direction, zero), lr, V::select(V::gt(zero, direction), minus_lr, direction));
        a = V::add(V::mul(beta2, a), V::mul(c2, g));
        p = decay.apply(p, update);
    }
};

// Adagrad: b = sum. Duchi et al. 2011.
template <class V> struct AdagradRule {
    using F = typename V::F;
    static constexpr bool has_a = false, has_b = true;
    Decay<V> decay;
    F step_size, eps;
    explicit AdagradRule(const Coefficients& c) : decay(c), step_size(V::set(c.step_size)), eps(V::set(c.eps)) {}
    ZERO_OPTIM_INLINE void operator()(F& p, F g, F&, F& b) const {
        g = decay.gradient(g, p);
        b = V::add(b, V::mul(g, g));
        p = V::sub(p, V::div(V::mul(step_size, g), V::add(V::sqrt(b), eps)));
    }
};

// SGD with momentum: a = momentum_buffer, which the first step sets to the gradient, undamped.
template <class V> struct MomentumRule {
    using F = typename V::F;
    static constexpr bool has_a = true, has_b = false;
    Decay<V> decay;
    F momentum, undamped, lr;
    bool nesterov, first;
    explicit MomentumRule(const Coefficients& c)
        : decay(c), momentum(V::set(c.beta1)), undamped(V::set(c.c1)), lr(V::set(c.step_size)), nesterov(c.nesterov),
          first(c.first_step) {}
    ZERO_OPTIM_INLINE void operator()(F& p, F g, F& a, F&) const {
        g = decay.gradient(g, p);
        a = first ? g : V::add(V::mul(momentum, a), V::mul(undamped, g));
        const F direction = nesterov ? V::add(g, V::mul(momentum, a)) : a;
        p = V::sub(p, V::mul(lr, direction));
    }
};

template <class V> struct SgdRule {
    using F = typename V::F;
    static constexpr bool has_a = false, has_b = false;
    Decay<V> decay;
    F lr;
    explicit SgdRule(const Coefficients& c) : decay(c), lr(V::set(c.step_size)) {}
    ZERO_OPTIM_INLINE void operator()(F& p, F g, F&, F&) const { p = V::sub(p, V::mul(lr, decay.gradient(g, p))); }
};
